"""The Python API: `LLM`, with the names and the results of vLLM's."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import LLMEngine
from outrider.entrypoints.decode_run import DecodeRun, EncodedPrompt
from outrider.errors import RequestError, shown
from outrider.generation_config import GenerationConfig
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from os import PathLike

    from outrider.outputs import RequestOutput
    from outrider.tokenizer import Tokenizer

    Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = ("prompt", "prompt_token_ids")


class LLM:
    """A checkpoint, ready to decode.

    Without `speculative_config` it decodes plainly (K = 0).

    Args:
        model: directory of the checkpoint; None is the bundled one.
        speculative_config: how to draft, such as
            `{"method": "mtp", "num_speculative_tokens": 3}`.
        engine_options: the fields of `EngineConfig`, and vLLM's options where they ask for what
            this build does anyway; an unknown one is an error.

    Raises:
        OutriderError: an option or the checkpoint cannot be used.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        speculative_config: Mapping[str, Any] | str | None = None,
        **engine_options: Any,
    ) -> None:
        config = EngineConfig.from_kwargs(
            model=model, speculative_config=speculative_config, **engine_options
        )
        self.llm_engine = LLMEngine.from_config(config)
        self._generation_config = GenerationConfig.from_pretrained(
            BUNDLED_MODEL_DIR if config.model is None else config.model
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Decode prompts to their end, together.

        Args:
            prompts: one or several. Each is a text, a list of token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`.
            sampling_params: for all prompts, or one for each; None is
                `get_default_sampling_params()`.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One result for each prompt, in their order.

        Raises:
            RequestError: one of the prompts cannot run; none has run then.
        """
        encoded = self.encode_prompts(prompts)
        params = self._params_for_each(len(encoded), sampling_params)
        with _progress(use_tqdm, len(encoded)) as on_finish:
            return DecodeRun(self.llm_engine, on_finish=on_finish).run(encoded, params)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for."""
        return self._generation_config.sampling_params

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self.llm_engine.tokenizer

    def with_num_speculative_tokens(self, k: int) -> LLM:
        """The same weights with another number of drafts, and with caches of their own.

        Args:
            k: drafts per step; 0 decodes plainly.
        """
        engine = self.llm_engine
        speculative = engine.config.speculative or SpeculativeConfig()
        config = replace(
            engine.config,
            speculative=replace(speculative, num_speculative_tokens=k) if k else None,
        )
        other = copy.copy(self)
        other.llm_engine = LLMEngine(config, engine.model, engine.tokenizer)
        return other

    def encode_prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[EncodedPrompt]:
        """Turn prompts of every accepted form into token ids.

        Errors name the index of the prompt, unless it was given alone.
        """
        if _is_one(prompts):
            return [self._encode("", prompts)]
        if not isinstance(prompts, Sequence):
            raise RequestError(f"prompts must be a text or a list of prompts, got {shown(prompts)}")
        return [self._encode(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]

    def _encode(self, name: str, prompt: object) -> EncodedPrompt:
        try:
            text, token_ids = _text_and_ids(prompt)
            if token_ids is None:
                assert text is not None, "a prompt has a text or token ids"
                token_ids = self.get_tokenizer().encode(text)
        except RequestError as error:
            raise RequestError(f"{name}: {error}" if name else str(error)) from None
        return EncodedPrompt(token_ids, text, name)

    def _params_for_each(self, num_prompts: int, params: object) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        given = list(params) if isinstance(params, Sequence) else [params]
        listed = [one for one in given if isinstance(one, SamplingParams)]
        if len(listed) != len(given):
            raise RequestError(
                f"sampling_params must be SamplingParams or a list of them, got {shown(params)}"
            )
        if len(listed) != num_prompts:
            raise RequestError(
                f"sampling_params has {len(listed)} entries for {num_prompts} prompts: "
                "give one for all, or one for each"
            )
        return listed


def _is_one(prompts: object) -> bool:
    """Whether this is one prompt: a text, an object, or a list of token ids."""
    if isinstance(prompts, str | Mapping):
        return True
    return (
        isinstance(prompts, Sequence)
        and len(prompts) > 0
        and all(isinstance(item, Integral) for item in prompts)
    )


def _text_and_ids(prompt: object) -> tuple[str | None, list[int] | None]:
    """Text and token ids of one prompt of any form; one of the two may be None."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return None, _token_ids("the prompt", prompt)
    if not isinstance(prompt, Mapping):
        raise RequestError(
            "a prompt must be a text, a list of token ids or an object with prompt or "
            f"prompt_token_ids, got {shown(prompt)}"
        )
    for key in prompt:
        if key not in _PROMPT_KEYS:
            near = difflib.get_close_matches(str(key), _PROMPT_KEYS, n=1, cutoff=0.0)[0]
            raise RequestError(f'unknown key {shown(key)} of a prompt; the nearest is "{near}"')
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise RequestError(f"prompt or prompt_token_ids is missing, got {shown(dict(prompt))}")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt must be a text, got {shown(text)}")
    return text, None if token_ids is None else _token_ids("prompt_token_ids", token_ids)


def _token_ids(name: str, value: object) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise RequestError(f"{name} must be a list of token ids, got {shown(value)}")
    for index, token_id in enumerate(value):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise RequestError(f"{name}[{index}] must be a token id, got {shown(token_id)}")
    return [int(token_id) for token_id in value]


@contextmanager
def _progress(is_shown: bool, num_prompts: int) -> Iterator[Callable[[int], object] | None]:
    """A progress bar on stderr; yields what to call when a prompt has ended."""
    if not is_shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    bar = Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)
    )
    with bar:
        task = bar.add_task("Prompts", total=num_prompts)
        yield lambda _: bar.advance(task)
