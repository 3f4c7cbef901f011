"""Requests that give way when blocks run out: they say what they say alone."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from outrider.engine.engine import LLMEngine
from outrider.sampling_params import SamplingParams
from tests.tiny_engine import (
    Decoded,
    Job,
    decode,
    decode_alone,
    make_engine,
    random_prompts,
    tiny_model,
)

BLOCK_SIZE, MAX_TOKENS = 4, 20
LENGTHS = (3, 14, 9, 6)
# Little more than the longest needs alone, and half of what all would need.
TIGHT, HALF = 9, 13

model = cache(tiny_model)


def params(index: int, temperature: float, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=index,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        **{"rejection_sample_method": "coupled", **options},
    )


@cache
def jobs(temperature: float) -> tuple[Job, ...]:
    prompts = random_prompts(LENGTHS, seed=5)
    return tuple(Job(p, params(i, temperature), arrival=i) for i, p in enumerate(prompts))


@cache
def expected(temperature: float) -> list[list[int]]:
    return [decode_alone(model(), job).token_ids for job in jobs(temperature)]


@cache
def bytes_per_block(k: int) -> int:
    return make_engine(model(), k, block_size=BLOCK_SIZE).cache_plan.bytes_per_block


def engine_with(k: int, num_blocks: int, **options: Any) -> LLMEngine:
    """An engine of so many blocks."""
    memory = num_blocks * bytes_per_block(k)
    engine = make_engine(model(), k, block_size=BLOCK_SIZE, kv_cache_memory=memory, **options)
    assert engine.cache_plan.num_blocks == num_blocks
    return engine


def num_preemptions(engine: LLMEngine) -> int:
    return engine.scheduler.num_preemptions


def assert_nothing_is_held(engine: LLMEngine) -> None:
    manager = engine.cache_manager
    manager.check_integrity()
    assert manager.num_free_rows == engine.config.max_num_seqs
    for table in manager.block_tables.values():
        assert table.pool.num_free == engine.cache_plan.num_blocks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("num_blocks", [TIGHT, HALF])
def test_texts_are_those_of_each_alone(num_blocks: int, k: int, temperature: float) -> None:
    engine = engine_with(k, num_blocks)
    results = decode(engine, jobs(temperature))
    assert [result.token_ids for result in results] == expected(temperature)
    assert num_preemptions(engine) > 0
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("options", [{"threshold": 1}, {"threshold": 7}, {"budget": 8}])
def test_running_again_in_pieces(options: dict[str, int]) -> None:
    """The rows of a step are few, and what ran in one piece before runs in several."""
    engine = engine_with(
        3,
        TIGHT,
        long_prefill_token_threshold=options.get("threshold", 0),
        max_num_batched_tokens=options.get("budget", 64),
    )
    results = decode(engine, jobs(0.0))
    assert [result.token_ids for result in results] == expected(0.0)
    assert num_preemptions(engine) > 0


def test_the_head_runs_again_as_well() -> None:
    """After the same text the same drafts are made and kept, but for the window that was lost."""
    k = 3
    free = decode(make_engine(model(), k), jobs(0.0))
    engine = engine_with(k, HALF)
    results = decode(engine, jobs(0.0))
    assert num_preemptions(engine) > 0
    shared = 0
    for result, other in zip(results, free, strict=True):
        windows, others = windows_by_length(result), windows_by_length(other)
        for length in windows.keys() & others.keys():
            # A window without drafts comes after each start, and nowhere else.
            if windows[length][0] and others[length][0]:
                assert windows[length] == others[length]
                shared += 1
    assert shared > 15


def windows_by_length(result: Decoded) -> dict[int, tuple[int, int, int]]:
    """The windows by the number of tokens emitted before each."""
    windows, emitted = {}, 0
    for window in result.windows:
        windows[emitted] = window
        emitted += window[2]
    return windows


def test_drafts_of_what_gave_way_are_dropped() -> None:
    """Its next window has none, and nothing drafted before it gave way is ever verified."""
    k = 3
    engine = engine_with(k, HALF)
    starts: list[tuple[str, int]] = []
    preempt = engine.scheduler._preempt_last

    def recorded() -> Any:
        request = preempt()
        starts.append((request.request_id, request.num_output_tokens))
        return request

    engine.scheduler._preempt_last = recorded  # type: ignore[method-assign]
    results = decode(engine, jobs(0.0))
    lost = {(name, num_output) for name, num_output in starts if num_output}
    assert lost
    for name, num_output in lost:
        window = windows_by_length(results[int(name)])[num_output]
        assert window == (0, 0, 1)
    # A draft is only missing where something was lost, or at the start and the very end.
    for i, result in enumerate(results):
        for length, (num_drafts, _, _) in windows_by_length(result).items():
            if length not in (0, MAX_TOKENS - 1) and (str(i), length) not in lost:
                assert num_drafts == min(k, MAX_TOKENS - length - 1)


@pytest.mark.parametrize("k", [0, 1, 2, 5, 8])
def test_every_row_has_a_block_of_its_own(k: int) -> None:
    """Of the target and of the head, at every length: nothing is written to the null block."""
    engine = engine_with(k, HALF)
    plan, counts = engine.cache_manager.plan, {"head": 0, "target": 0}

    def checked(spans: Any, group_names: Any, *args: Any, **options: Any) -> Any:
        positions, slot_mapping, windows = plan(spans, group_names, *args, **options)
        for slots in slot_mapping.values():
            assert (slots >= BLOCK_SIZE).all(), "a row of the null block"
        counts["target" if "delta_net" in group_names else "head"] += 1
        return positions, slot_mapping, windows

    engine.cache_manager.plan = checked  # type: ignore[method-assign]
    decode(engine, jobs(0.0))
    assert counts["target"] == engine.num_steps
    assert (counts["head"] > 0) == (k > 0)


def test_a_prompt_that_gives_way_before_its_first_token() -> None:
    """Its pieces run again from the start; what is reported of its prompt is reported once."""
    prompts = random_prompts((10, 20), seed=9)
    options = {"long_prefill_token_threshold": 1, "max_num_batched_tokens": 16}
    expected_texts, expected_reports, _ = run_reporting(make_engine(model(), 3, **options), prompts)
    texts, reports, progress = run_reporting(engine_with(3, 12, **options), prompts)
    assert texts == expected_texts
    # Somewhere in its prompt it lost what it had.
    assert any(0 < before < 20 and after == 0 for before, after in pairwise(progress))
    for report, expected_report, prompt in zip(reports, expected_reports, prompts, strict=True):
        assert report[0] is None
        assert [entry.token_ids for entry in report[1:]] == [[token] for token in prompt[1:]]
        assert [e.logprobs[0] for e in report[1:]] == pytest.approx(
            [e.logprobs[0] for e in expected_report[1:]], abs=1e-9
        )


def run_reporting(engine: LLMEngine, prompts: list[list[int]]) -> Any:
    """Texts, log probabilities of the prompts, and how far the last request had run."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params(i, 0.0, prompt_logprobs=0))
    last = engine.scheduler._requests[str(len(prompts) - 1)]
    texts: list[list[int]] = [[] for _ in prompts]
    reports: list[Any] = [None for _ in prompts]
    progress = []
    while engine.has_unfinished_requests():
        progress.append(last.num_computed_tokens)
        for output in engine.step():
            texts[int(output.request_id)] += output.new_token_ids
            if output.prompt_logprobs is not None:
                assert reports[int(output.request_id)] is None, "reported twice"
                reports[int(output.request_id)] = output.prompt_logprobs
    return texts, reports, progress


def test_the_first_never_waits() -> None:
    """Whoever came first has rows in every step until it ends, and so on down the queue."""
    engine = engine_with(3, TIGHT)
    schedule, order = engine.scheduler.schedule, [str(i) for i in range(len(LENGTHS))]

    def recorded() -> Any:
        batch = schedule()
        alive = [name for name in order if name in engine.scheduler]
        ids = [request.request_id for request in batch.requests]
        assert ids == alive[: len(ids)]
        queue = [*engine.scheduler._running, *engine.scheduler._waiting]
        assert [request.request_id for request in queue] == alive
        return batch

    engine.scheduler.schedule = recorded  # type: ignore[method-assign]
    decode(engine, [Job(job.prompt, job.params) for job in jobs(0.0)])
    assert num_preemptions(engine) > 0


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_what_others_do_changes_a_text_only_by_a_lost_window(rule: str) -> None:
    """Up to where it first gave way, a request with a seed says what it says alone."""
    batch = [
        Job(job.prompt, params(i, 1.0, rejection_sample_method=rule))
        for i, job in enumerate(jobs(0.0))
    ]
    alone = [decode(make_engine(model(), 3), [job])[0].token_ids for job in batch]
    engine = engine_with(3, HALF)
    first: dict[str, int] = {}
    preempt = engine.scheduler._preempt_last

    def recorded() -> Any:
        request = preempt()
        first.setdefault(request.request_id, request.num_output_tokens)
        return request

    engine.scheduler._preempt_last = recorded  # type: ignore[method-assign]
    results = decode(engine, batch)
    assert first
    for i, result in enumerate(results):
        length = first.get(str(i), MAX_TOKENS)
        assert result.token_ids[:length] == alone[i][:length]
