"""Engines that keep what was run, and what a cold run says and computes."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from outrider.engine.engine import LLMEngine
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.mtp_proposer import MTPProposer
from tests.tiny_engine import Decoded, Job, decode, make_engine, random_prompts, tiny_model

BLOCK, K, MAX_TOKENS = 8, 3, 12

model = cache(tiny_model)


@cache
def text(length: int = 60, seed: int = 5) -> list[int]:
    return random_prompts([length], seed)[0]


def make(k: int = K, **options: Any) -> LLMEngine:
    return make_engine(model(), k, **{"max_num_seqs": 4, "block_size": BLOCK, **options})


def cold(prompt: Sequence[int], params: SamplingParams, k: int = K, **options: Any) -> Decoded:
    """What a request says, and how it is drafted, where nothing is kept of anybody."""
    engine = make(k, enable_prefix_caching=False, **options)
    return decode(engine, [Job(list(prompt), params)])[0]


def ask(engine: LLMEngine, prompt: Sequence[int], params: SamplingParams) -> tuple[Decoded, int]:
    """What a request says, and how many tokens of its prompt did not have to run."""
    before = engine.scheduler.prefix.num_hit_tokens
    (said,) = decode(engine, [Job(list(prompt), params)])
    return said, engine.scheduler.prefix.num_hit_tokens - before


def logits_of(engine: LLMEngine) -> list[torch.Tensor]:
    """Collects the logits of the target, and those that the head's drafts are drawn from."""
    seen, verify = [], engine.model_runner.verify

    def verified(*args: Any) -> Any:
        target = verify(*args)
        seen.append(target.logits.clone())
        return target

    engine.model_runner.verify = verified  # type: ignore[method-assign]
    if isinstance(engine.proposer, MTPProposer):
        draw = engine.proposer._sampler.draw

        def drawn(logits: torch.Tensor, *args: Any) -> Any:
            seen.append(logits.clone())
            return draw(logits, *args)

        engine.proposer._sampler.draw = drawn
    return seen


def cold_logits(
    prompt: list[int], params: SamplingParams, k: int = K
) -> tuple[Decoded, list[torch.Tensor]]:
    """What a request says in a cold run, and all logits on the way."""
    engine = make(k, enable_prefix_caching=False)
    seen = logits_of(engine)
    return decode(engine, [Job(prompt, params)])[0], seen


def assert_alike(seen: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Logits are those of a cold run; what was seen is emptied."""
    for logits, wanted in zip(seen, expected, strict=True):
        assert torch.allclose(logits, wanted, rtol=0, atol=1e-12)
    seen.clear()


def whole_blocks(num_tokens: int) -> int:
    """Tokens before the last boundary at which a prompt can begin: its last token runs."""
    return (num_tokens - 1) // BLOCK * BLOCK
