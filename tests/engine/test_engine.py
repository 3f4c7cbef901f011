"""The engine's loop: requests that come and go, their K, their rule, and what is kept of them."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.batch import ScheduledBatch
from outrider.engine.engine import LLMEngine
from outrider.errors import RequestError
from outrider.sampling_params import SamplingParams
from tests.scripted_proposer import Drafter, ScriptedProposer
from tests.tiny_engine import (
    VOCAB_SIZE,
    Decoded,
    Job,
    decode,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    step,
    tiny_model,
    windows_by_length,
)

K, MAX_TOKENS = 4, 24
LENGTHS = (2, 7, 12, 18, 23, 31)

model = cache(tiny_model)


@cache
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, seed=8)


@cache
def expected() -> list[list[int]]:
    return [decode_alone(model(), Job(p, greedy(MAX_TOKENS))).token_ids for p in prompts()]


def perfect_engine(k: int, **options: Any) -> LLMEngine:
    """An engine whose requests "0", "1", ... decode the prompts above with perfect drafts."""
    engine = make_engine(model(), k, **options)
    scripts = {
        str(i): Drafter([*prompt, *output], VOCAB_SIZE).perfect
        for i, (prompt, output) in enumerate(zip(prompts(), expected(), strict=True))
    }
    engine.proposer = ScriptedProposer(scripts, k)
    return engine


def free_resources(engine: LLMEngine) -> list[int]:
    """What the caches can still give out, in every group."""
    manager = engine.cache_manager
    manager.check_integrity()
    blocks = [table.pool.num_free for table in manager.block_tables.values()]
    return [manager.num_free_rows, *blocks, *(len(p._free) for p in manager.state_pools.values())]


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_between_any_two_steps(num_steps: int) -> None:
    """Before the first step, in the middle of the prompt, between windows; the others go on."""
    engine = make_engine(model(), K, max_num_batched_tokens=16)
    before = free_resources(engine)
    results = {str(i): Decoded() for i in range(len(LENGTHS))}
    for i, prompt in enumerate(prompts()):
        engine.add_request(str(i), prompt, greedy(MAX_TOKENS))
    for _ in range(num_steps):
        step(engine, results)
    engine.abort_request("1")
    engine.abort_request("5")
    emitted = {name: list(results[name].token_ids) for name in ("1", "5")}
    while engine.has_unfinished_requests():
        step(engine, results)
    assert free_resources(engine) == before
    for i, output in enumerate(expected()):
        result = results[str(i)]
        if str(i) in emitted:
            assert result.token_ids == emitted[str(i)] == output[: len(result.token_ids)]
            assert result.finish_reason is None, "nothing is heard of it again"
        else:
            assert (result.token_ids, result.finish_reason) == (output, "length")


def test_abort_what_waits_is_unknown_or_is_over() -> None:
    engine = make_engine(model(), K, max_num_seqs=1)
    before = free_resources(engine)
    engine.abort_request("nobody")
    for name in ("a", "b", "c"):
        engine.add_request(name, prompts()[0], greedy(3))
    engine.step()
    engine.abort_request("b")
    engine.abort_request("b")
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["a", "c"]
    engine.abort_request("c")
    assert free_resources(engine) == before
    assert engine.step() == []
    num_steps = engine.num_steps
    engine.step()
    assert engine.num_steps == num_steps, "a step with nothing to do is none"


def test_an_id_is_free_again_when_its_request_is_over() -> None:
    engine = make_engine(model(), K)
    engine.add_request("x", prompts()[1], greedy(MAX_TOKENS))
    with pytest.raises(RequestError, match="request id 'x' is in use"):
        engine.add_request("x", prompts()[2], greedy(MAX_TOKENS))
    engine.step()
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("x", prompts()[2], greedy(MAX_TOKENS))
    engine.abort_request("x")
    engine.add_request("x", prompts()[2], greedy(MAX_TOKENS))
    results = {"x": Decoded()}
    while engine.has_unfinished_requests():
        step(engine, results)
    assert results["x"].token_ids == expected()[2]
    engine.add_request("x", prompts()[3], greedy(MAX_TOKENS))
    engine.abort_request("x")
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("k", [0, 1, K])
def test_num_computed_tokens(k: int) -> None:
    """Rows that have run and are kept: all but the newest token, whatever was drafted."""
    engine = make_engine(model(), k, max_num_batched_tokens=12)
    for i, prompt in enumerate(prompts()[3:5]):
        engine.add_request(str(i), prompt, greedy(MAX_TOKENS))
    requests = list(engine.scheduler._requests.values())
    assert [request.num_computed_tokens for request in requests] == [0, 0]
    ran = {request.request_id: 0 for request in requests}
    schedule = engine.scheduler.schedule

    def recorded() -> ScheduledBatch:
        batch = schedule()
        for request, span in zip(batch.requests, batch.spans, strict=True):
            assert span.start == request.num_computed_tokens == ran[request.request_id]
            assert span.num_certain_rows >= 1
            known = len(request.token_ids) - span.start
            assert span.num_certain_rows == known or span.num_drafts == 0
        assert sum(span.num_rows for span in batch.spans) <= 12
        return batch

    engine.scheduler.schedule = recorded  # type: ignore[method-assign]
    while engine.has_unfinished_requests():
        emitted = {output.request_id for output in engine.step()}
        for request in requests:
            if request.request_id in emitted and request.request_id in engine.scheduler:
                assert request.num_computed_tokens == len(request.token_ids) - 1
            ran[request.request_id] = request.num_computed_tokens
    assert [request.token_ids for request in requests] == [
        [*prompt, *output] for prompt, output in zip(prompts()[3:5], expected()[3:5], strict=True)
    ]


@pytest.mark.parametrize("k", range(1, 9))
def test_k_is_clipped_at_the_cap(k: int) -> None:
    """The head drafts what may still be emitted, less the token that comes for nothing."""
    engine = make_engine(model(), k)
    results = decode(engine, [Job(p, greedy(10 + i)) for i, p in enumerate(prompts())])
    for i, result in enumerate(results):
        emitted = 1
        for num_drafts, _, num_emitted in result.windows[1:]:
            assert num_drafts == min(k, 10 + i - emitted - 1)
            emitted += num_emitted
        assert emitted == 10 + i


@pytest.mark.parametrize("length", [33, 40])
def test_k_is_clipped_at_max_model_len(length: int) -> None:
    engine = make_engine(model(), 8, max_model_len=length)
    for max_tokens in (None, 1000):
        results = decode(engine, [Job(p, greedy(max_tokens)) for p in prompts()])
        for prompt, output, result in zip(prompts(), expected(), results, strict=True):
            room = length - len(prompt)
            assert result.finish_reason == "length"
            assert len(result.token_ids) == room
            assert result.token_ids[:MAX_TOKENS] == output[:room]
            emitted = 1
            for num_drafts, _, num_emitted in result.windows[1:]:
                assert num_drafts == min(8, room - emitted - 1)
                emitted += num_emitted


def test_k_of_each_request() -> None:
    """0 to K in one batch, and None for the engine's; the texts are what they always are."""
    ks = [0, 1, 2, 3, K, None]
    jobs = [
        Job(prompt, greedy(MAX_TOKENS, num_speculative_tokens=k))
        for prompt, k in zip(prompts(), ks, strict=True)
    ]
    for engine in (make_engine(model(), K), perfect_engine(K)):
        results = decode(engine, jobs)
        assert [result.token_ids for result in results] == expected()
        for k, result in zip(ks, results, strict=True):
            asked = K if k is None else k
            left = MAX_TOKENS - 1
            for num_drafts, _, num_emitted in result.windows[1:]:
                assert num_drafts == min(asked, left - 1)
                left -= num_emitted
    with pytest.raises(RequestError, match="num_speculative_tokens 5 is more than the engine's 4"):
        engine.add_request("x", prompts()[0], greedy(3, num_speculative_tokens=5))
    with pytest.raises(RequestError, match="num_speculative_tokens 1 is more than the engine's 0"):
        make_engine(model()).add_request("x", prompts()[0], greedy(3, num_speculative_tokens=1))


RULES = ("standard", "block", "coupled")


def sampled(index: int, rule: str | None, **options: Any) -> SamplingParams:
    defaults = {"temperature": 0.8, "top_p": 0.95, "seed": index, "max_tokens": MAX_TOKENS}
    return SamplingParams(
        **{**defaults, "ignore_eos": True, "rejection_sample_method": rule, **options}
    )


def test_rules_mixed_in_a_batch() -> None:
    """Each request says what it says alone, under its own rule, beside greedy ones too."""
    jobs = [
        Job(prompt, greedy(MAX_TOKENS) if i in (1, 4) else sampled(i, RULES[i % 3]), arrival=i)
        for i, prompt in enumerate(prompts())
    ]
    alone = [decode(make_engine(model(), K), [job])[0] for job in jobs]
    together = decode(make_engine(model(), K), jobs)
    assert together == alone
    assert [alone[i].token_ids for i in (1, 4)] == [expected()[i] for i in (1, 4)]


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_of_the_engine_is_that_of_requests_that_name_none(rule: str) -> None:
    own = [Job(p, sampled(i, rule)) for i, p in enumerate(prompts())]
    named = decode(make_engine(model(), K), own)
    jobs = [Job(p, sampled(i, None)) for i, p in enumerate(prompts())]
    assert decode(make_engine(model(), K, rejection_sample_method=rule), jobs) == named
    others = [other for other in RULES if other != rule]
    for other in others:
        assert decode(make_engine(model(), K, rejection_sample_method=other), jobs) != named


def acceptance(k: int, **options: Any) -> list[list[tuple[int, int, int]]]:
    jobs = [Job(p, greedy(MAX_TOKENS)) for p in prompts()]
    return [result.windows for result in decode(make_engine(model(), k, **options), jobs)]


@pytest.mark.parametrize("budget", [24, 25, 30])
def test_acceptance_after_a_prompt_in_pieces(budget: int) -> None:
    """The head follows the prompt in pieces as it does in one: the same drafts are kept."""
    k = 3
    whole = acceptance(k)
    assert acceptance(k, max_num_batched_tokens=budget) == whole
    assert sum(accepted for windows in whole for _, accepted, _ in windows) > 20


def test_steps_without_drafts_in_between_lower_no_acceptance() -> None:
    """The head follows the text through steps in which nothing was drafted."""
    (plain,) = decode(make_engine(model(), K), [Job(prompts()[3], greedy(MAX_TOKENS))])
    engine = make_engine(model(), K)
    propose, turns = engine.proposer.propose, iter(range(1000))

    def sometimes(batch: ScheduledBatch, hidden_states: Tensor, result: Any) -> Any:
        drafts = propose(batch, hidden_states, result)
        return None if next(turns) % 3 == 0 else drafts

    engine.proposer.propose = sometimes  # type: ignore[method-assign]
    (result,) = decode(engine, [Job(prompts()[3], greedy(MAX_TOKENS))])
    assert result.token_ids == plain.token_ids
    assert (0, 0, 1) in result.windows[2:]
    # Where both draft after the same text, both keep the same drafts.
    by_length = [windows_by_length(one) for one in (plain, result)]
    shared = by_length[0].keys() & by_length[1].keys()
    assert len(shared) > 4
    assert all(by_length[0][length] == by_length[1][length] for length in shared)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize(("k", "budget"), [(0, 1), (0, 7), (0, 64), (3, 4), (3, 7), (3, 64)])
def test_prompts_that_share_a_step(size: int, k: int, budget: int) -> None:
    """A step that holds only prompts, or pieces of them, with drafts configured or not."""
    engine = make_engine(model(), k, max_num_batched_tokens=budget)
    results = decode(engine, [Job(p, greedy(6)) for p in prompts()[:size]])
    assert [r.token_ids for r in results] == [output[:6] for output in expected()[:size]]


@pytest.mark.parametrize("k", [2, 5, 7])
def test_prompts_and_windows_that_share_a_step(k: int) -> None:
    """Staggered starts: text and acceptance of each are what they are alone."""
    jobs = [Job(p, greedy(MAX_TOKENS), arrival=2 * i) for i, p in enumerate(prompts())]
    alone = [decode(make_engine(model(), k), [Job(job.prompt, job.params)])[0] for job in jobs]
    assert decode(make_engine(model(), k), jobs) == alone
    assert [result.token_ids for result in alone] == expected()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, K])
def test_logits_that_are_no_numbers(k: int, temperature: float, value: float) -> None:
    """One request's logits break after some steps: it ends, the others say what they always say.

    All NaN, all minus infinity, or one plus infinity.
    """
    jobs = [
        Job(p, greedy(MAX_TOKENS) if temperature == 0 else sampled(i, "coupled"))
        for i, p in enumerate(prompts())
    ]
    reference = decode(make_engine(model()), jobs)
    engine = make_engine(model(), k)
    verify, broken, steps = engine.model_runner.verify, "2", iter(range(1000))

    def break_logits(batch: ScheduledBatch) -> Any:
        target, first = verify(batch), 0
        is_time = next(steps) >= 3
        for request, span in zip(batch.requests, batch.spans, strict=True):
            if request.request_id == broken and is_time:
                rows = slice(first, first + span.num_drafts + 1)
                target.logits[rows, 7 if value == torch.inf else slice(None)] = value
            first += span.num_drafts + 1
        return target

    engine.model_runner.verify = break_logits  # type: ignore[method-assign]
    results = decode(engine, jobs)
    for i, (result, plain) in enumerate(zip(results, reference, strict=True)):
        if str(i) != broken:
            assert (result.token_ids, result.finish_reason) == (plain.token_ids, "length")
    count = len(results[2].token_ids)
    assert results[2].finish_reason == "error"
    assert 3 <= count < MAX_TOKENS
    assert results[2].token_ids == reference[2].token_ids[:count]
    engine.model_runner.verify = verify  # type: ignore[method-assign]
    again = decode(engine, jobs)
    assert [r.token_ids for r in again] == [r.token_ids for r in reference]


def test_a_draft_row_that_is_no_number_ends_its_window() -> None:
    """The target's rows from a draft on break now and then: the text does not change."""
    engine = perfect_engine(K)
    verify, turns = engine.model_runner.verify, iter(range(1000))

    def break_rows(batch: ScheduledBatch) -> Any:
        target, first = verify(batch), 0
        for span in batch.spans:
            depth = 1 + next(turns) % K
            target.logits[first + depth : first + span.num_drafts + 1] = torch.nan
            first += span.num_drafts + 1
        return target

    engine.model_runner.verify = break_rows  # type: ignore[method-assign]
    results = decode(engine, [Job(p, greedy(MAX_TOKENS)) for p in prompts()])
    assert [result.token_ids for result in results] == expected()
    assert all(result.finish_reason == "length" for result in results)
    assert engine.metrics.num_fallbacks > 10
    assert {num_emitted for _, _, num_emitted in results[0].windows} > {1, 2}
