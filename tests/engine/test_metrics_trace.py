"""The counters against a trace counted by hand, through the real scheduler and rejection sampler.

The target is a table: after position p it says what the text says at p + 1, whatever was drafted.
"""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.batch import DraftTokens, SampledTokens, ScheduledBatch
from outrider.cache.cache_manager import CacheManager
from outrider.cache.groups import GroupSpec, Rollback, TensorSpec
from outrider.engine.engine import EngineCore
from outrider.engine.model_runner import TargetOutput
from outrider.engine.scheduler import Scheduler
from outrider.request import Request
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.rejection_sampler import RejectionSampler
from outrider.spec_decode.request_sampling import SamplingDefaults
from outrider.stop_checker import StopChecker
from tests.scripted_proposer import drafts_of

VOCAB_SIZE, EOS, K = 10, 9, 3
CPU = torch.device("cpu")
# The texts: a prompt, then what the target says, past the end as well.
TEXTS = {"a": [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, EOS, 3, 3, 5, 5], "b": [5, 6, 7, 8, 1, 2, 3, 4]}
NUM_PROMPT_TOKENS = {"a": 2, "b": 1}
MAX_TOKENS = {"a": 20, "b": 5}
# What is drafted after each step of a request, and what comes of it: (drafts, accepted, tokens).
DRAFTS = {
    "a": [[4, 5, 0], [-1, -1, -1], [], [1, -1, EOS], [EOS, 3, 3]],
    "b": [[7], [1, 2, 3]],
}
STEPS: dict[str, list[tuple[int, int, list[int]]]] = {
    "a": [
        (0, 0, [3]),  # the prompt
        (3, 2, [4, 5, 6]),  # the third draft is refused, and 6 recovered in its place
        (0, 0, [7]),  # placeholders alone are no draft
        (0, 0, [8]),  # K = 0
        (1, 1, [1, 2]),  # what comes after a placeholder is not verified, be it right or not
        (3, 1, [EOS]),  # all three would be kept; the first ends the text
    ],
    "b": [
        (0, 0, [6]),
        (1, 1, [7, 8]),
        (2, 2, [1, 2]),  # room for two tokens: two drafts run, and no third token comes out
    ],
}
REASONS = {"a": ("stop", None), "b": ("length", None)}


class TableTarget:
    """Says what the text of each request says."""

    def verify(self, batch: ScheduledBatch) -> TargetOutput:
        rows = []
        for request, span in zip(batch.requests, batch.spans, strict=True):
            text = TEXTS[request.request_id]
            first = span.start + span.num_certain_rows - 1
            rows += [text[p + 1] for p in range(first, span.start + span.num_rows)]
        logits = torch.nn.functional.one_hot(torch.tensor(rows), VOCAB_SIZE).float() * 50
        return TargetOutput(logits, torch.zeros(1, 1))


class ListProposer:
    """Drafts from a list, one entry a step."""

    def __init__(self) -> None:
        self._left = {name: list(drafts) for name, drafts in DRAFTS.items()}

    def propose(
        self, batch: ScheduledBatch, hidden_states: Tensor, result: SampledTokens
    ) -> DraftTokens | None:
        rows = [
            self._left[request.request_id].pop(0) if self._left[request.request_id] else []
            for request in batch.requests
        ]
        return drafts_of(rows)


def make_core() -> EngineCore:
    state = TensorSpec("state", (1,), Rollback.REPLAY)
    manager = CacheManager(
        [GroupSpec("state", False, 1, (state,))],
        block_size=4,
        num_blocks=8,
        max_num_seqs=2,
        max_model_len=32,
        num_pending_rows=K,
        dtype=torch.float32,
        device=CPU,
    )
    return EngineCore(
        Scheduler(manager, max_num_batched_tokens=64, num_speculative_tokens=K),
        TableTarget(),  # type: ignore[arg-type]
        RejectionSampler(SamplingDefaults("block", VOCAB_SIZE, VOCAB_SIZE, CPU)),
        manager,
        ListProposer(),
    )


def make_request(name: str, temperature: float) -> Request:
    count = NUM_PROMPT_TOKENS[name]
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS[name])
    return Request(
        request_id=name,
        token_ids=TEXTS[name][:count],
        num_prompt_tokens=count,
        params=params,
        max_output_tokens=MAX_TOKENS[name],
        stop_checker=StopChecker(params, frozenset([EOS]), MAX_TOKENS[name], None),
        seed=0,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_trace(temperature: float) -> None:
    core = make_core()
    for name in TEXTS:
        core.scheduler.add(make_request(name, temperature))
    outputs: dict[str, list[Any]] = {name: [] for name in TEXTS}
    while core.scheduler.has_unfinished_requests:
        for output in core.step():
            outputs[output.request_id].append(output)
        core.cache_manager.check_integrity()
    for name, steps in STEPS.items():
        got = [(o.num_draft_tokens, o.num_accepted_tokens, o.new_token_ids) for o in outputs[name]]
        assert got == steps, name
        assert all(output.finish_reason is None for output in outputs[name][:-1])
        last = outputs[name][-1]
        assert (last.finish_reason, last.stop_reason) == REASONS[name]
    # Six steps of a and three of b.
    metrics = core.scheduler.metrics
    assert asdict(metrics) == {
        "num_speculative_tokens": K,
        "num_target_passes": 6 + 3,
        "num_drafts": 3 + 2,
        "num_draft_tokens": (3 + 1 + 3) + (1 + 2),
        "num_accepted_tokens": (2 + 1 + 1) + (1 + 2),
        "num_emitted_tokens": (1 + 3 + 1 + 1 + 2 + 1) + (1 + 2 + 2),
        "num_draft_tokens_per_pos": [3 + 2, 2 + 1, 2],
        "num_accepted_tokens_per_pos": [3 + 2, 1 + 1, 0],
        "num_fallbacks": 0,
    }
    assert metrics.mean_acceptance_length == 1 + 7 / 5
    assert metrics.acceptance_rate == 7 / 10
    assert metrics.acceptance_rate_per_pos == [1.0, 2 / 3, 0.0]
    assert metrics.tokens_per_target_pass == 14 / 9
