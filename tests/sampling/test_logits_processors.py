"""Logits processors over the rows of many windows, against one row at a time in plain Python."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID
from outrider.request import Request
from outrider.sampling import process_logits
from outrider.sampling.logits_processors_naive import process_logits_naive
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.request_sampling import gather_processors
from outrider.stop_checker import StopChecker

CPU = torch.device("cpu")
VOCAB_SIZE = 9


def make_request(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    bad_words: Sequence[Sequence[int]] = (),
    stops: Sequence[int] = (),
    **params: Any,
) -> Request:
    sampling_params = SamplingParams(**params)
    return Request(
        request_id="",
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        params=sampling_params,
        max_output_tokens=100,
        stop_checker=StopChecker(sampling_params, frozenset(stops), 100, None),
        seed=0,
        bad_words_token_ids=bad_words,
    )


def random_request(choose: random.Random) -> Request:
    """Each processor in about every second request, and none in about every fourth."""

    def ids(least: int, most: int) -> list[int]:
        # Few ids, so that bad words are met.
        return [choose.choice((0, 1, 2, 5)) for _ in range(choose.randint(least, most))]

    is_user = choose.random() < 0.75

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if is_user and choose.random() < 0.5 else otherwise

    return make_request(
        ids(1, 6),
        ids(0, 6),
        bad_words=sometimes([ids(1, 3) for _ in range(choose.randint(1, 4))], ()),
        stops=choose.sample(range(VOCAB_SIZE + 2), choose.randint(0, 2)),
        min_tokens=sometimes(choose.randint(1, 9), 0),
        logit_bias=sometimes({choose.randrange(VOCAB_SIZE): choose.uniform(-5, 5)}, None),
        repetition_penalty=sometimes(choose.choice((0.5, 1.3, 2.0)), 1.0),
        frequency_penalty=sometimes(choose.uniform(-2, 2), 0.0),
        presence_penalty=sometimes(choose.uniform(-2, 2), 0.0),
    )


def expected_row(logits: Tensor, request: Request, drafts: Sequence[int]) -> list[float]:
    return process_logits_naive(
        logits.tolist(),
        request.params,
        request.token_ids[: request.num_prompt_tokens],
        [*request.output_token_ids, *drafts],
        [token_id for token_id in request.stop_token_ids if token_id < VOCAB_SIZE],
        request.bad_words_token_ids,
    )


def assert_rows(got: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("draw", range(20))
def test_windows_equal_the_naive_rows(draw: int) -> None:
    """Windows of 0 to 4 drafts; in some nothing was drawn from a place on, and no row counts."""
    choose = random.Random(draw)
    requests = [random_request(choose) for _ in range(12)]
    counts = [choose.randint(0, 4) for _ in requests]
    drafts = [[choose.choice((0, 1, 2, 5)) for _ in range(4)] for _ in requests]
    for row in drafts[::3]:
        first = choose.randint(0, 3)
        row[first:] = [PLACEHOLDER_TOKEN_ID] * (4 - first)
    owners = [i for i, count in enumerate(counts) for _ in range(count + 1)]
    depths = [depth for count in counts for depth in range(count + 1)]
    logits = torch.randn(len(owners), VOCAB_SIZE, dtype=torch.float64) * 3
    before = logits.clone()
    processors = gather_processors(requests, None, VOCAB_SIZE, CPU)
    assert processors is not None
    got = process_logits(logits, None, processors.rows(owners, depths, torch.tensor(drafts)))
    counted = [
        (row, i, drafts[i][:depth])
        for row, (i, depth) in enumerate(zip(owners, depths, strict=True))
        if PLACEHOLDER_TOKEN_ID not in drafts[i][:depth]
    ]
    expected = [expected_row(logits[row], requests[i], said) for row, i, said in counted]
    assert_rows(got[[row for row, _, _ in counted]], expected)
    assert torch.equal(logits, before), "the model's own logits are reported as they are"


@pytest.mark.parametrize("draw", range(10))
def test_a_draft_step_of_some_requests_equals_the_naive_rows(draw: int) -> None:
    """The drafter: tokens just emitted are not among the request's own yet."""
    choose = random.Random(100 + draw)
    requests = [random_request(choose) for _ in range(8)]
    new = [[choose.choice((0, 1, 2, 5)) for _ in range(choose.randint(1, 4))] for _ in requests]
    drafts = [[choose.choice((0, 1, 2, 5)) for _ in range(draw % 4)] for _ in requests]
    active = sorted(choose.sample(range(8), 5))
    logits = torch.randn(len(active), VOCAB_SIZE, dtype=torch.float64) * 3
    processors = gather_processors(requests, new, VOCAB_SIZE, CPU)
    assert processors is not None
    draft_ids = torch.tensor(drafts, dtype=torch.int64).view(8, draw % 4)
    got = process_logits(logits, None, processors.rows(active, [draw % 4] * len(active), draft_ids))
    assert_rows(
        got,
        [
            expected_row(logits[row], requests[i], [*new[i], *drafts[i]])
            for row, i in enumerate(active)
        ],
    )


def test_nobody_who_asks_for_nothing_pays() -> None:
    plain = make_request([1, 2], [3], temperature=0.7, top_k=3, min_p=0.1, stops=[4])
    over = make_request([1, 2], [3, 4], min_tokens=2, stops=[4])
    assert gather_processors([plain, over], None, VOCAB_SIZE, CPU) is None
    logits = torch.randn(2, VOCAB_SIZE)
    assert process_logits(logits, None, None) is logits

    user = make_request([1, 2], [3], presence_penalty=1)
    processors = gather_processors([plain, user], None, VOCAB_SIZE, CPU)
    assert processors is not None
    no_drafts = torch.empty(2, 0, dtype=torch.int64)
    assert processors.rows([0], [0], no_drafts) is None
    (got,) = process_logits(logits[:1], None, processors.rows([1], [0], no_drafts))
    assert got.tolist() == [*logits[0, :3].tolist(), float(logits[0, 3] - 1), *logits[0, 4:]]


def test_min_tokens_ends_when_the_new_tokens_are_counted() -> None:
    request = make_request([1], [3], min_tokens=3, stops=[4])
    assert gather_processors([request], [[5, 5]], VOCAB_SIZE, CPU) is None
    assert gather_processors([request], [[5]], VOCAB_SIZE, CPU) is not None


def test_order_of_the_processors() -> None:
    """A bias comes before the penalties, which scale it, and what is masked stays masked."""
    request = make_request(
        [0], [1], repetition_penalty=2.0, logit_bias={0: 3.0, 1: -5.0, 2: 100.0}, bad_words=[[2]]
    )
    processors = gather_processors([request], None, 3, CPU)
    assert processors is not None
    rows = processors.rows([0], [0], torch.empty(1, 0, dtype=torch.int64))
    got = process_logits(torch.tensor([[1.0, 1.0, 1.0]]), None, rows)
    assert got.tolist() == [[2.0, -8.0, -math.inf]]
    mask = torch.tensor([False, True, True])
    assert process_logits(torch.ones(1, 3), mask, rows)[0, 0] == -math.inf


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_breaks_no_other(value: float) -> None:
    """And stays as broken as it was."""
    requests = [
        make_request(
            [0, 1],
            [1, 2],
            bad_words=[[1, 2, 3]],
            repetition_penalty=1.2,
            presence_penalty=-1,
            logit_bias={5: 2},
            min_tokens=5,
            stops=[7],
        )
        for _ in range(3)
    ]
    processors = gather_processors(requests, None, VOCAB_SIZE, CPU)
    assert processors is not None
    rows = processors.rows(range(3), [0] * 3, torch.empty(3, 0, dtype=torch.int64))
    logits = torch.randn(3, VOCAB_SIZE)
    healthy = process_logits(logits, None, rows)
    logits[1] = value
    got = process_logits(logits, None, rows)
    assert torch.equal(got[::2], healthy[::2])
    assert not got[1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_processed_in_float32(dtype: torch.dtype) -> None:
    request = make_request([0, 1], [1, 2], repetition_penalty=1.2, frequency_penalty=0.01)
    processors = gather_processors([request], None, VOCAB_SIZE, CPU)
    assert processors is not None
    rows = processors.rows([0], [0], torch.empty(1, 0, dtype=torch.int64))
    logits = torch.randn(1, VOCAB_SIZE).to(dtype)
    got = process_logits(logits, None, rows)
    assert torch.equal(got, process_logits(logits.float(), None, rows))


def test_extreme_repetition_penalties_are_numbers() -> None:
    for penalty in (1e-300, 1e300):
        request = make_request([0, 1, 2], repetition_penalty=penalty)
        processors = gather_processors([request], None, 4, CPU)
        assert processors is not None
        rows = processors.rows([0], [0], torch.empty(1, 0, dtype=torch.int64))
        got = process_logits(torch.tensor([[-1e4, 0.0, 1e4, 1.0]]), None, rows)
        assert got.isfinite().all()
        assert (int(got.argmax()) == 2) == (penalty < 1)
        assert got[0, 1:2].tolist() == [0.0]
