"""How many drafts come next: what is asked for, the cap of the request, the drafter's own limit."""

from functools import cache
from typing import Any

import pytest

from outrider.request import Request
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.draft_length import draft_length
from outrider.stop_checker import StopChecker
from tests.tiny_engine import (
    Decoded,
    Job,
    decode,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
)

K, MAX_TOKENS, LENGTHS = 4, 30, (3, 9, 17)
model = cache(tiny_model)


def make_request(num_prompt: int, num_output: int, cap: int, **options: Any) -> Request:
    params = SamplingParams(max_tokens=cap, **options)
    return Request(
        request_id="0",
        token_ids=[1] * (num_prompt + num_output),
        num_prompt_tokens=num_prompt,
        params=params,
        max_output_tokens=cap,
        stop_checker=StopChecker(params, frozenset(), cap, None),
        seed=0,
    )


@pytest.mark.parametrize(
    ("num_output", "num_new", "limit", "expected"),
    [
        (0, 1, None, 3),
        (0, 1, 1000, 3),
        (5, 1, None, 3),  # 10 - 6 = 4 may still be emitted, one of them for nothing
        (6, 1, None, 2),
        (6, 3, None, 0),
        (9, 1, None, 0),
        (0, 1, 24, 3),  # positions 21, 22, 23
        (0, 1, 23, 2),
        (1, 1, 23, 1),
        (2, 1, 23, 0),
        (2, 4, 23, 0),
        (0, 1, 5, 0),  # the prompt alone is past it
        (6, 1, 29, 2),  # both limits, the cap the nearer one
        (6, 1, 28, 1),
    ],
)
def test_clipped(num_output: int, num_new: int, limit: int | None, expected: int) -> None:
    assert draft_length(make_request(20, num_output, 10), num_new, 3, limit) == expected


@pytest.mark.parametrize(("wanted", "expected"), [(None, 3), (0, 0), (1, 1), (3, 3)])
def test_what_the_request_asks_for(wanted: int | None, expected: int) -> None:
    request = make_request(20, 0, 10, num_speculative_tokens=wanted)
    assert draft_length(request, 1, 3) == expected
    assert draft_length(request, 1, 2, 100) == min(expected, 2)


@cache
def jobs() -> tuple[Job, ...]:
    return tuple(Job(p, greedy(MAX_TOKENS)) for p in random_prompts(LENGTHS, seed=6))


@cache
def unlimited() -> list[Decoded]:
    results = decode(make_engine(model(), K), jobs())
    assert [r.token_ids for r in results] == [decode_alone(model(), j).token_ids for j in jobs()]
    return results


@pytest.mark.parametrize("limit", [1, 10, 20, 27, 46, 1000])
def test_a_limit_of_the_drafter_below_that_of_the_target(limit: int) -> None:
    """Up to it the same drafts are kept; past it decoding goes on plainly, to the same text."""
    engine = make_engine(model(), K, drafter_max_model_len=limit)
    for job, result, free in zip(jobs(), decode(engine, jobs()), unlimited(), strict=True):
        assert result.token_ids == free.token_ids
        assert result.finish_reason == "length"
        num_emitted = 1
        for i, (num_drafts, _, num_new) in enumerate(result.windows[1:], 1):
            start = len(job.prompt) + num_emitted
            assert num_drafts == max(min(K, MAX_TOKENS - num_emitted - 1, limit - start), 0)
            if start + K <= limit:
                assert result.windows[i] == free.windows[i]
            num_emitted += num_new
    num_drafts = sum(window[0] > 0 for result in unlimited() for window in result.windows)
    assert (engine.metrics.num_drafts == num_drafts) == (limit >= 46)


def test_a_head_that_is_past_its_limit_does_not_run() -> None:
    engine = make_engine(model(), K, drafter_max_model_len=LENGTHS[-1])
    passes = []
    forward = engine.proposer._forward
    engine.proposer._forward = lambda *args, **kw: passes.append(args) or forward(*args, **kw)
    decode(engine, jobs()[-1:])
    assert not passes
    decode(engine, jobs()[:1])
    assert passes
