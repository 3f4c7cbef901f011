"""The step of speculative decoding, and the engine that owns its parts."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.engine.cache_plan import plan_cache
from outrider.engine.margins import MarginMeter
from outrider.engine.model_runner import ModelRunner
from outrider.engine.proposers import make_proposer
from outrider.engine.scheduler import Scheduler
from outrider.errors import ConfigError, ContextLengthError, RequestError, shown
from outrider.grammar.compiler import GrammarCompiler
from outrider.models.qwen4_exp.cache_specs import target_layer_states
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.weights import load_model
from outrider.request import Request
from outrider.spec_decode.rejection_sampler import RejectionSampler
from outrider.spec_decode.request_sampling import SamplingDefaults
from outrider.stop_checker import StopChecker
from outrider.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from outrider.cache.cache_manager import CacheManager
    from outrider.config import EngineConfig
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.outputs import StepOutput
    from outrider.sampling_params import SamplingParams
    from outrider.spec_decode.interface import Proposer
    from outrider.spec_decode.metrics import SpecDecodeMetrics

logger = logging.getLogger(__name__)


class EngineCore:
    """The step, over parts that are given to it.

    Args:
        scheduler: who runs.
        model_runner: the target.
        rejection_sampler: what stays.
        cache_manager: every kind of state.
        proposer: what may come next.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        rejection_sampler: RejectionSampler,
        cache_manager: CacheManager,
        proposer: Proposer,
    ) -> None:
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.rejection_sampler = rejection_sampler
        self.cache_manager = cache_manager
        self.proposer = proposer

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Schedule, verify, accept, commit, propose: one pass of the target for all requests.

        Prefill is the same path with no drafts, and plain decoding is K = 0.
        """
        batch = self.scheduler.schedule()
        target = self.model_runner.verify(batch)
        result = self.rejection_sampler(batch, target.logits)
        self.cache_manager.commit(batch.spans, result.num_accepted_tokens)
        drafts = self.proposer.propose(batch, target.hidden_states, result)
        return self.scheduler.update(batch, result, drafts)


class LLMEngine(EngineCore):
    """A model with its caches, ready for requests of token ids.

    Args:
        config: every option.
        model: the loaded target, with its head where drafts are asked for.
        tokenizer: ids that it does not have are padding of the vocabulary, never drafted or
            emitted, and its end-of-sequence ids end an output. Without one the whole vocabulary
            is used, and the model configuration's end-of-sequence ids.

    Raises:
        ConfigError: the options do not fit the model or the memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Qwen4ExpForCausalLM,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        config = config.resolve()
        self.config = config
        self.model = model
        self.max_model_len = _max_model_len(
            config, min(model.config.max_position_embeddings, model.rotary.max_positions)
        )
        self._tokenizer = tokenizer
        self.eos_token_ids = frozenset(model.config.eos_token_ids)
        self.num_allowed_tokens = model.config.vocab_size
        missing_ids: frozenset[int] = frozenset()
        if tokenizer is not None:
            self.eos_token_ids |= frozenset(tokenizer.eos_token_ids)
            self.num_allowed_tokens, missing_ids = tokenizer.num_tokens, tokenizer.missing_ids
        self.grammars = GrammarCompiler(tokenizer, model.config.vocab_size, self.eos_token_ids)
        self.num_steps = 0
        # Of the last request that had any.
        self._spelled_words: tuple[Sequence[str] | None, list[list[int]]] | None = None
        # Requests without a seed draw entropy, or follow the engine's seed in their order.
        self._seeds: random.Random = random.SystemRandom()
        if config.seed is not None:
            # Random takes the absolute value, by which -5 would be 5.
            self._seeds = random.Random(config.seed % (1 << 64))
        self.cache_plan = plan_cache(config, model, self.max_model_len)
        cache_manager = self.cache_plan.build()
        logger.info("%s", self.cache_plan.summary())
        self.sampling_defaults = defaults = SamplingDefaults(
            config.rejection_sample_method,
            model.config.vocab_size,
            self.num_allowed_tokens,
            cache_manager.device,
            config.logprobs_mode,
            missing_ids,
        )
        super().__init__(
            Scheduler(
                cache_manager,
                max_num_batched_tokens=config.max_num_batched_tokens,
                num_speculative_tokens=config.num_speculative_tokens,
                drafter_max_model_len=config.drafter_max_model_len,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
            ),
            ModelRunner(
                model,
                cache_manager,
                target_layer_states(
                    model.config, cache_manager.groups, cache_manager.snapshot_groups
                ),
                defaults.known_ids,
            ),
            RejectionSampler(defaults),
            cache_manager,
            make_proposer(config, model, cache_manager, defaults),
        )

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLMEngine:
        """Loads the checkpoint that the options name, the bundled one if they name none.

        Raises:
            OutriderError: the checkpoint or the options cannot be used, in one line.
        """
        config = config.resolve()
        model_dir = BUNDLED_MODEL_DIR if config.model is None else Path(config.model)
        # Before anything of that length is made.
        _max_model_len(config, Qwen4ExpConfig.from_pretrained(model_dir).max_position_embeddings)
        model = load_model(
            model_dir,
            device=config.device,
            dtype=config.torch_dtype,
            want_mtp=config.uses_mtp,
            max_positions=config.max_model_len,
        )
        tokenizer = Tokenizer.from_pretrained(model_dir, model.config.vocab_size)
        return cls(config, model, tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        assert self._tokenizer is not None, "this engine was made without a tokenizer"
        return self._tokenizer

    @property
    def metrics(self) -> SpecDecodeMetrics:
        """Sums over all requests so far."""
        return self.scheduler.metrics

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished_requests

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises the RequestError that `add_request` would."""
        num_prompt = len(prompt_token_ids)
        if not num_prompt:
            raise RequestError("the prompt is empty: at least one token is needed")
        if num_prompt >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, and the maximum context length is "
                f"{self.max_model_len} tokens (max_model_len): no room is left for output"
            )
        self._check_token_ids(prompt_token_ids)
        self._check_params(params)
        if not self.cache_manager.fits(num_prompt + self._max_output_tokens(num_prompt, params)):
            raise RequestError(
                f"the prompt of {num_prompt} tokens and its output do not fit into the caches: "
                "raise kv_cache_memory or lower max_tokens"
            )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        choice_index: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queues a request.

        Args:
            request_id: unique among those that are not finished.
            prompt_token_ids: at least one, in the range of the tokenizer.
            params: what is asked for.
            choice_index: among the choices of one user request with one seed.
            cache_salt: only requests with the same one share what they have run.

        Raises:
            RequestError: it can never run.
        """
        if request_id in self.scheduler:
            raise RequestError(f"request id {request_id!r} is in use")
        self.check_request(prompt_token_ids, params)
        seed = self._seed(params)
        request = self._make_request(request_id, prompt_token_ids, params, seed, choice_index)
        request.cache_salt = cache_salt
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = []
        self.scheduler.add(request)

    def flush_text(self, request_id: str) -> str:
        """What was held back of a request's text, for one that is aborted after this.

        It may have become a stop string or a character. Nothing of an unknown request.
        """
        return self.scheduler.flush_text(request_id)

    def abort_request(self, request_id: str) -> None:
        """Drops a request, in the middle of a step too; an id that is unknown or over is no error.

        Nothing more is emitted for it.
        """
        self.scheduler.abort(request_id)

    def step(self) -> list[StepOutput]:
        """One step (`EngineCore.step`); nothing to do is an empty list.

        Where it raises, nothing has been emitted: the requests wait to run again from the tokens
        that they have, and can be aborted.
        """
        if not self.has_unfinished_requests():
            return []
        self.num_steps += 1
        try:
            return super().step()
        except BaseException:
            self.scheduler.cancel_step()
            raise

    def reset_prefix_cache(self) -> None:
        """Forgets what requests have left to others; those that run go on as they are."""
        if self.cache_manager.prefix is not None:
            self.cache_manager.prefix.forget_all()

    def margins(
        self, token_ids: Sequence[int], num_prompt_tokens: int, params: SamplingParams
    ) -> Tensor:
        """How near each position of a sequence is to another outcome (`MarginMeter.measure`)."""
        prompt = token_ids[:num_prompt_tokens]
        request = self._make_request("margins", prompt, params, params.seed or 0)
        request.token_ids += token_ids[num_prompt_tokens:]
        meter = MarginMeter(
            self.model,
            self.model_runner,
            self.cache_manager,
            self.sampling_defaults,
            self.config.max_num_batched_tokens,
        )
        return meter.measure(request)

    def _make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        choice_index: int = 0,
    ) -> Request:
        """A request with what the engine knows of its end, its bad words and its grammar."""
        stops = frozenset(params.stop_token_ids or ())
        grammar, final_ids = None, frozenset[int]()
        if params.structured_outputs is not None:
            grammar, final_ids = self.grammars.path(params.structured_outputs), self.eos_token_ids
        if grammar is not None or not params.ignore_eos:
            stops |= self.eos_token_ids
        room = self._max_output_tokens(len(prompt_token_ids), params)
        return Request(
            request_id=request_id,
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            params=params,
            max_output_tokens=room,
            stop_checker=StopChecker(params, stops, room, self._tokenizer, final_ids),
            seed=seed,
            choice=choice_index,
            bad_words_token_ids=self._bad_words(params),
            grammar=grammar,
        )

    def _check_token_ids(self, token_ids: Iterable[int], where: str = "") -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.num_allowed_tokens:
                raise RequestError(
                    f"token id {shown(token_id)}{where} is out of range: ids are 0 to "
                    f"{self.num_allowed_tokens - 1}"
                )
            if token_id in self.sampling_defaults.missing_ids:
                raise RequestError(f"token id {token_id}{where} has no token in the tokenizer")

    def _check_params(self, params: SamplingParams) -> None:
        """What only an engine can tell of parameters."""
        wanted, most = params.num_speculative_tokens, self.config.num_speculative_tokens
        if wanted is not None and wanted > most:
            raise RequestError(f"num_speculative_tokens {wanted} is more than the engine's {most}")
        limit = self.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and limit >= 0 and not 0 <= value <= limit:
                asked = "-1, the whole vocabulary," if value < 0 else f"{value}"
                raise RequestError(f"{name} {asked} is more than max_logprobs {limit}")
        self._check_token_ids(params.logit_bias or (), " in logit_bias")
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self._tokenizer is None:
                raise RequestError(f"{name} needs a tokenizer, and this engine has none")
        if params.structured_outputs is not None:
            self.grammars.check_available()

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The ways each bad word is spelled: at the start of a text, and after a space."""
        words = params.bad_words
        if not words:
            return []
        # The choices and prompts of one request have the same ones.
        if self._spelled_words is not None and self._spelled_words[0] == words:
            return self._spelled_words[1]
        # No other white space is taken off: a line break is a word of its own.
        spelled = [
            self.tokenizer.encode(prefix + (word.lstrip(" ") or word), add_special_tokens=False)
            for word in words
            for prefix in ("", " ")
        ]
        self._spelled_words = (words, [token_ids for token_ids in spelled if token_ids])
        return self._spelled_words[1]

    def _max_output_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        room = self.max_model_len - num_prompt_tokens
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _seed(self, params: SamplingParams) -> int:
        """The request's seed; without one, the next of the engine's own."""
        return self._seeds.getrandbits(63) if params.seed is None else params.seed


def _max_model_len(config: EngineConfig, limit: int) -> int:
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the checkpoint's {limit}"
        )
    return config.max_model_len or limit
