"""Requests that are aborted at any moment, and steps that fail on their way."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from outrider.engine.engine import LLMEngine
from tests.tiny_engine import (
    Decoded,
    Job,
    decode,
    greedy,
    make_engine,
    random_prompts,
    step,
    tiny_model,
)

K, MAX_TOKENS = 3, 12
LENGTHS = (2, 9, 5, 30)
NAMES = [str(i) for i in range(len(LENGTHS))]

model = cache(tiny_model)
Action = Callable[[], object]


@cache
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, seed=8)


def engine_of_pieces() -> LLMEngine:
    """The last prompt takes some steps, beside the windows of the others."""
    return make_engine(model(), K, long_prefill_token_threshold=9)


def start(engine: LLMEngine) -> dict[str, Decoded]:
    for name, prompt in zip(NAMES, prompts(), strict=True):
        engine.add_request(name, prompt, greedy(MAX_TOKENS))
    return {name: Decoded() for name in NAMES}


@cache
def undisturbed() -> dict[str, Decoded]:
    engine = engine_of_pieces()
    results = start(engine)
    while engine.has_unfinished_requests():
        step(engine, results)
    return results


def called(function: Callable[..., Any], *, before: Action = int, after: Action = int) -> Any:
    def wrapper(*args: Any, **options: Any) -> Any:
        before()
        result = function(*args, **options)
        after()
        return result

    return wrapper


# Where in a step something else happens.
PHASES: dict[str, Callable[[Any, Action], None]] = {
    "scheduled": lambda e, act: setattr(
        e.scheduler, "schedule", called(e.scheduler.schedule, after=act)
    ),
    "verifying": lambda e, act: setattr(
        e.cache_manager, "plan", called(e.cache_manager.plan, after=act)
    ),
    "verified": lambda e, act: setattr(
        e.model_runner, "verify", called(e.model_runner.verify, after=act)
    ),
    "judged": lambda e, act: setattr(
        e, "rejection_sampler", called(e.rejection_sampler, after=act)
    ),
    "committed": lambda e, act: setattr(
        e.cache_manager, "commit", called(e.cache_manager.commit, after=act)
    ),
    "drafting": lambda e, act: setattr(
        e.proposer, "_forward", called(e.proposer._forward, before=act)
    ),
    "drafted": lambda e, act: setattr(e.proposer, "propose", called(e.proposer.propose, after=act)),
}


def at(engine: LLMEngine, phase: str, num_steps: int, action: Action) -> None:
    """Lets `action` happen once, in a phase of the step after so many."""
    left = [action]

    def once() -> None:
        if engine.num_steps == num_steps + 1 and left:
            left.pop()()

    PHASES[phase](engine, once)


def free_resources(engine: LLMEngine) -> list[int]:
    manager = engine.cache_manager
    manager.check_integrity()
    blocks = [table.pool.num_free for table in manager.block_tables.values()]
    return [manager.num_free_rows, *blocks, *(len(p._free) for p in manager.state_pools.values())]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("victim", "num_steps"), [("1", 0), ("0", 1), ("3", 1), ("2", 3)])
def test_abort_in_a_step(victim: str, num_steps: int, phase: str) -> None:
    """In its prompt or in a window: it emits nothing more, and the others notice nothing."""
    engine = engine_of_pieces()
    everything = free_resources(engine)
    results = start(engine)

    def abort_twice() -> None:
        engine.abort_request(victim)
        engine.abort_request(victim)
        assert victim not in engine.scheduler

    at(engine, phase, num_steps, abort_twice)
    for _ in range(num_steps):
        step(engine, results)
    emitted = list(results[victim].token_ids)
    step(engine, results)
    assert victim not in engine.scheduler
    assert engine.cache_manager.num_free_rows == everything[0] - (len(NAMES) - 1)
    while engine.has_unfinished_requests():
        step(engine, results)
    assert free_resources(engine) == everything
    assert results[victim].token_ids == emitted
    assert results[victim].finish_reason is None
    assert emitted == undisturbed()[victim].token_ids[: len(emitted)]
    for name in NAMES:
        if name != victim:
            assert results[name] == undisturbed()[name]


@pytest.mark.parametrize("phase", ["scheduled", "judged", "drafted"])
def test_the_counters_of_a_step_in_which_a_request_was_aborted(phase: str) -> None:
    """What is not emitted is not counted."""
    engine = engine_of_pieces()
    results = start(engine)
    at(engine, phase, 2, lambda: engine.abort_request("0"))
    while engine.has_unfinished_requests():
        step(engine, results)
    windows = [window for result in results.values() for window in result.windows]
    assert engine.metrics.num_target_passes == len(windows)
    assert engine.metrics.num_emitted_tokens == sum(num for _, _, num in windows)
    assert engine.metrics.num_accepted_tokens == sum(num for _, num, _ in windows)


@pytest.mark.parametrize("phase", PHASES)
def test_an_id_that_is_given_again_in_the_same_step(phase: str) -> None:
    """The new request is not taken for the old one."""
    engine = engine_of_pieces()
    results = start(engine)

    def replace() -> None:
        engine.abort_request("1")
        engine.add_request("1", prompts()[2], greedy(MAX_TOKENS))
        results["1"] = Decoded()

    at(engine, phase, 2, replace)
    while engine.has_unfinished_requests():
        step(engine, results)
    assert results["1"] == undisturbed()["2"]
    assert results["0"] == undisturbed()["0"]


def test_everything_is_aborted_in_a_step() -> None:
    engine = engine_of_pieces()
    everything = free_resources(engine)
    results = start(engine)
    at(engine, "judged", 2, lambda: [engine.abort_request(name) for name in NAMES])
    for _ in range(2):
        step(engine, results)
    assert engine.step() == []
    assert not engine.has_unfinished_requests()
    assert free_resources(engine) == everything
    assert engine.scheduler._drafts is None


def test_abort_of_what_waits_after_it_gave_way() -> None:
    """It is dropped from the queue; its caches are gone already."""
    bytes_per_block = engine_of_pieces().cache_plan.bytes_per_block
    engine = make_engine(model(), K, kv_cache_memory=9 * bytes_per_block)
    everything = free_resources(engine)
    jobs = [Job(prompts()[i], greedy(40)) for i in (1, 2)]
    expected = decode(make_engine(model(), K), jobs)
    for name, job in zip("ab", jobs, strict=True):
        engine.add_request(name, job.prompt, job.params)
    results = {name: Decoded() for name in "ab"}
    second = engine.scheduler._requests["b"]
    while not second.num_preemptions:
        assert engine.has_unfinished_requests()
        step(engine, results)
    assert second.row is None
    engine.abort_request("b")
    engine.abort_request("b")
    while engine.has_unfinished_requests():
        step(engine, results)
    assert results["a"].token_ids == expected[0].token_ids
    num_emitted = len(results["b"].token_ids)
    assert 0 < num_emitted < 40
    assert results["b"].token_ids == expected[1].token_ids[:num_emitted]
    assert free_resources(engine) == everything


class Failure(Exception):
    pass


def fail() -> None:
    raise Failure


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_step_that_fails(num_steps: int, phase: str) -> None:
    """Nothing is lost: all run again from the tokens that they have, and say what they say."""
    engine = engine_of_pieces()
    everything = free_resources(engine)
    results = start(engine)
    at(engine, phase, num_steps, fail)
    for _ in range(num_steps):
        step(engine, results)
    num_running = len(engine.scheduler._running)
    with pytest.raises(Failure):
        engine.step()
    assert free_resources(engine) == everything
    assert engine.scheduler.num_preemptions >= num_running
    assert [request.request_id for request in engine.scheduler._waiting] == NAMES
    while engine.has_unfinished_requests():
        step(engine, results)
    assert free_resources(engine) == everything
    for name in NAMES:
        assert results[name].token_ids == undisturbed()[name].token_ids
        assert results[name].finish_reason == "length"


@pytest.mark.parametrize("phase", PHASES)
def test_all_can_be_aborted_after_a_step_that_failed(phase: str) -> None:
    engine = engine_of_pieces()
    everything = free_resources(engine)
    results = start(engine)

    def abort_one_and_fail() -> None:
        engine.abort_request("2")
        fail()

    at(engine, phase, 2, abort_one_and_fail)
    for _ in range(2):
        step(engine, results)
    with pytest.raises(Failure):
        engine.step()
    assert "2" not in engine.scheduler
    assert "2" not in [request.request_id for request in engine.scheduler._waiting]
    for name in NAMES:
        engine.abort_request(name)
    assert free_resources(engine) == everything
    assert not engine.has_unfinished_requests()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 0)
    assert engine.step() == []
    again = start(engine)
    while engine.has_unfinished_requests():
        step(engine, again)
    assert again == undisturbed()
