"""Prompts that run in pieces, several in one step and beside the windows of others."""

from functools import cache
from typing import Any

import pytest

from outrider.batch import ScheduledBatch
from outrider.engine.engine import LLMEngine
from tests.tiny_engine import (
    Decoded,
    Job,
    decode,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
    windows_by_length,
)

MAX_TOKENS = 10
# One is longer than the longest piece, and one is a single token.
LENGTHS = (9, 70, 23, 1, 31)
CHUNKS = [1, 7, 64]

model = cache(tiny_model)


@cache
def jobs() -> tuple[Job, ...]:
    return tuple(Job(p, greedy(MAX_TOKENS)) for p in random_prompts(LENGTHS, seed=11))


@cache
def expected() -> list[list[int]]:
    return [decode_alone(model(), job).token_ids for job in jobs()]


@cache
def alone(k: int) -> list[Decoded]:
    """Each with its prompt in one piece and nobody beside it."""
    return [decode(make_engine(model(), k), [job])[0] for job in jobs()]


def record_batches(engine: LLMEngine) -> list[ScheduledBatch]:
    schedule, batches = engine.scheduler.schedule, []

    def recorded() -> ScheduledBatch:
        batches.append(schedule())
        return batches[-1]

    engine.scheduler.schedule = recorded  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("k", [0, 3])
def test_prompts_that_share_a_step(k: int, chunk: int, size: int) -> None:
    """A step that holds nothing but pieces of prompts, with drafts configured or not."""
    engine = make_engine(model(), k, long_prefill_token_threshold=chunk)
    batches = record_batches(engine)
    results = decode(engine, jobs()[:size])
    assert [span.num_rows for span in batches[0].spans] == [min(chunk, n) for n in LENGTHS[:size]]
    assert [result.token_ids for result in results] == expected()[:size]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_acceptance_after_a_prompt_in_pieces(chunk: int) -> None:
    """The head follows the prompt in pieces as it does in one: the same drafts are kept."""
    engine = make_engine(model(), 3, long_prefill_token_threshold=chunk)
    assert decode(engine, jobs()) == alone(3)
    assert sum(accepted for result in alone(3) for _, accepted, _ in result.windows) > 8


@pytest.mark.parametrize("k", range(1, 8))
def test_pieces_beside_windows(k: int) -> None:
    """Staggered starts: text and acceptance of each are what they are alone, at every K."""
    engine = make_engine(model(), k, long_prefill_token_threshold=7)
    batches = record_batches(engine)
    staggered = [Job(job.prompt, job.params, arrival=2 * i) for i, job in enumerate(jobs())]
    results = decode(engine, staggered)
    assert results == alone(k)
    assert [result.token_ids for result in results] == expected()
    assert sum(is_mixed(batch) for batch in batches) > 5


def is_mixed(batch: ScheduledBatch) -> bool:
    """Whether pieces of prompts and windows with drafts are in one step."""
    return not all(batch.is_sampling) and any(span.num_drafts for span in batch.spans)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("period", [2, 3])
def test_steps_without_drafts_lower_no_acceptance(period: int, chunk: int) -> None:
    """Drafts are withheld now and then: those made after the same text are kept as before."""
    k = 3
    engine = make_engine(model(), k, long_prefill_token_threshold=chunk)
    propose = engine.proposer.propose

    def sometimes(batch: ScheduledBatch, *args: Any) -> Any:
        drafts = propose(batch, *args)
        return None if engine.num_steps % period == 0 else drafts

    engine.proposer.propose = sometimes  # type: ignore[method-assign]
    results = decode(engine, jobs())
    num_shared = 0
    for result, free in zip(results, alone(k), strict=True):
        assert result.token_ids == free.token_ids
        windows, others = windows_by_length(result), windows_by_length(free)
        shared = windows.keys() & others.keys()
        assert all(windows[length] == others[length] for length in shared)
        num_shared += len(shared)
    assert num_shared > 8


def test_a_step_says_whether_it_ran_rows_of_a_prompt() -> None:
    engine = make_engine(tiny_model(), 2, max_num_batched_tokens=8, max_num_seqs=2)
    engine.add_request("short", [5, 6], greedy(30))
    engine.add_request("long", [7] * 40, greedy(4))
    flags, first = [], None
    while engine.has_unfinished_requests():
        outputs = engine.step()
        flags.append(engine.scheduler.has_prompt_rows)
        if first is None and any(output.request_id == "long" for output in outputs):
            first = len(flags)
    assert first is not None
    assert first >= 6
    assert flags == [True] * first + [False] * (len(flags) - first)
    assert len(flags) > first
