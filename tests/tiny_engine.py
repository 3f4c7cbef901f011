"""A tiny model whose head is often right, engines around it, and the loop that runs them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import LLMEngine
from outrider.logprobs import TokenLogprobs
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer

_LINEAR, _INDEXED = "linear_attention", "indexed_attention"
# Every kind of block and of state; the indexer's budget is 8 positions, so that a text of 20 is
# past it.
TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "layer_types": (_LINEAR, _INDEXED, _LINEAR),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "output_gate_type": "sigmoid",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 7,
    "hc_count": 3,
    "hc_lowrank": 5,
    "ple_layer_ids": (1, 3),
    "ple_embed_dim": 12,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 53,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "eos_token_id": 2,
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 256,
}
VOCAB_SIZE: int = TINY["vocab_size"]
# What a layer writes to the streams, beside embeddings of size one: enough for texts without
# short cycles, and little enough for the head to guess.
_TRUNK_SCALE, _HEAD_SCALE = 0.5, 0.05
_WRITES = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight", "value_proj.weight")


@torch.no_grad()
def tiny_model(
    dtype: torch.dtype = torch.float64,
    seed: int = 3,
    trunk_scale: float = _TRUNK_SCALE,
    **overrides: Any,
) -> Qwen4ExpForCausalLM:
    """A random model, no norm the identity and no convolution zero, with a head that can guess.

    Much of what the target says next follows from its last token. The head reads that token
    through the target's own mixer, and so is right about a third of the time.
    """
    config = Qwen4ExpConfig(**{**TINY, **overrides})
    model = Qwen4ExpForCausalLM(config, config.mtp_num_hidden_layers)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() >= 2 and "embed_tokens" not in name
        std = parameter.shape[-1] ** -0.5 if is_matrix else 0.5
        if "embed_tokens" in name:
            std = 1.0
        parameter.normal_(0.0, std, generator=generator)
        if name.endswith("linear_attn.norm.weight"):
            parameter.add_(1.0)
        if name.endswith(_WRITES):
            parameter.mul_(_HEAD_SCALE if name.startswith("mtp.") else trunk_scale)
    head = model.mtp
    assert head is not None
    head.fc_embedding.weight.copy_(torch.eye(config.hidden_size))
    head.fc_hidden.weight.mul_(_HEAD_SCALE)
    head.pre_fc_norm_embedding.weight.zero_()
    head.hyper_connection_mixer.load_state_dict(model.model.hyper_connection_mixer.state_dict())
    model.to(dtype).build_tables()
    return model.eval()


def make_engine(
    model: Qwen4ExpForCausalLM, k: int = 0, tokenizer: Tokenizer | None = None, **options: Any
) -> LLMEngine:
    """An engine that drafts K tokens with the head; `options` as in `EngineConfig.from_kwargs`.

    Options of `speculative_config` are given by their own names, but for `drafter_max_model_len`.
    """
    speculative: dict[str, Any] = {"num_speculative_tokens": k}
    for name in [f.name for f in fields(SpeculativeConfig) if f.name != "max_model_len"]:
        if name in options:
            speculative[name] = options.pop(name)
    speculative["max_model_len"] = options.pop("drafter_max_model_len", None)
    defaults = {"max_model_len": 128, "max_num_seqs": 8, "block_size": 8, "device": "cpu"}
    config = EngineConfig.from_kwargs(
        **{**defaults, **options},
        dtype=str(model.lm_head.weight.dtype).removeprefix("torch."),
        speculative_config=speculative if k else None,
    )
    return LLMEngine(config, model, tokenizer)


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Prompts of given lengths; here and there the end-of-sequence token is among the ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Temperature 0, to the cap."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **options})


@dataclass
class Job:
    """One request.

    Attributes:
        prompt: ids.
        params: what is asked for.
        arrival: the step before which it is added.
    """

    prompt: list[int]
    params: SamplingParams
    arrival: int = 0


@dataclass
class Decoded:
    """What became of a request.

    Attributes:
        token_ids: emitted.
        windows: per step in which it emitted or ended: drafts verified, accepted, tokens emitted.
        finish_reason: why it ended.
        stop_reason: the id or the text that stopped it.
        text: the pieces of all steps; empty without a tokenizer.
        logprobs: of each token, where the request asks for them.
    """

    token_ids: list[int] = field(default_factory=list)
    windows: list[tuple[int, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def windows_by_length(result: Decoded) -> dict[int, tuple[int, int, int]]:
    """The windows with drafts, by the number of tokens emitted before each."""
    windows, emitted = {}, 0
    for window in result.windows:
        if window[0]:
            windows[emitted] = window
        emitted += window[2]
    return windows


def step(engine: LLMEngine, results: dict[str, Decoded]) -> None:
    """One step; what it yields is added to `results`, and every table is checked."""
    for output in engine.step():
        result = results[output.request_id]
        assert result.finish_reason is None, "a request that has ended emits nothing"
        result.token_ids += output.new_token_ids
        result.text += output.new_text
        result.logprobs += output.logprobs or []
        result.windows.append(
            (output.num_draft_tokens, output.num_accepted_tokens, len(output.new_token_ids))
        )
        result.finish_reason, result.stop_reason = output.finish_reason, output.stop_reason
    engine.cache_manager.check_integrity()


def decode(engine: LLMEngine, jobs: Sequence[Job]) -> list[Decoded]:
    """Runs requests to their ends; request i has the id str(i)."""
    results = {str(i): Decoded() for i in range(len(jobs))}
    waiting = sorted(range(len(jobs)), key=lambda i: jobs[i].arrival)
    now = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and jobs[waiting[0]].arrival <= now:
            i = waiting.pop(0)
            engine.add_request(str(i), jobs[i].prompt, jobs[i].params)
        step(engine, results)
        now += 1
    assert engine.cache_manager.num_free_rows == engine.config.max_num_seqs, "a row is leaked"
    return list(results.values())


def decode_alone(model: Qwen4ExpForCausalLM, job: Job) -> Decoded:
    """The reference: plain decoding (K = 0), nobody else in the batch."""
    engine = make_engine(model, max_num_seqs=1)
    return decode(engine, [Job(job.prompt, job.params)])[0]
