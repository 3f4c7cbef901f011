"""Log probabilities and what is picked out of them."""

import math

import pytest
import torch

from outrider.sampling import (
    LogprobReport,
    SamplingTensors,
    compute_logprobs,
    compute_probs,
    num_reported,
    raw_logprobs,
)


def tensors(
    temperature: list[float], top_k: list[int], top_p: list[float], min_p: list[float]
) -> SamplingTensors:
    mask = torch.arange(40) < 37
    return SamplingTensors.from_values(temperature, top_k, top_p, min_p, allowed_mask=mask)


def test_is_the_logarithm_of_the_law() -> None:
    """Of rows that take the argmax, of the softmax before temperature and filters."""
    temperatures = [1.0, 0.5, 0.0, 2.0, 0.0, 1.0]
    filters = ([0, 3, 5, 0, 0, 0], [1.0, 0.9, 0.5, 1.0, 1.0, 0.7], [0.0, 0.0, 0.3, 0.1, 0.0, 0.0])
    params = tensors(temperatures, *filters)
    logits = torch.randn(6, 40, dtype=torch.float64)
    got = compute_logprobs(logits, params)
    expected = compute_probs(logits, params).log()
    masked = logits.masked_fill(torch.arange(40) >= 37, -torch.inf)
    for row in (2, 4):
        expected[row] = masked[row].log_softmax(-1)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    alone = compute_logprobs(logits[2:3], tensors([0.0], [5], [0.5], [0.3]))
    torch.testing.assert_close(alone, got[2:3], rtol=1e-14, atol=0)


def test_the_unlikely_have_logprobs_too() -> None:
    """Where the probability itself is 0 in float32."""
    logits = torch.zeros(1, 40)
    logits[0, 0] = 300.0
    got = compute_logprobs(logits, tensors([1.0], [0], [1.0], [0.0]))
    assert float(got[0, 5]) == pytest.approx(-300, abs=1e-3)
    assert float(got[0, 39]) == -math.inf
    assert float(raw_logprobs(logits.bfloat16())[0, 39]) == pytest.approx(-300, abs=1e-3)
    assert raw_logprobs(logits.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("num_top", [0, 1, 4, 12])
@pytest.mark.parametrize("num_levels", [1, 3, 1000])
def test_report_equals_sorting(num_levels: int, num_top: int) -> None:
    """With many ties: a stable sort says which of equals come first, counting says the rank."""
    logprobs = (torch.rand(20, 12) * num_levels).round() / num_levels - 1
    logprobs[3:6, ::2] = -torch.inf
    token_ids = torch.randint(12, (20,))
    report = LogprobReport.of(logprobs, token_ids, num_top)
    entries = report.to_host([num_top] * 20)
    assert len(entries) == 20
    for row, own, entry in zip(logprobs.tolist(), token_ids.tolist(), entries, strict=True):
        order = sorted(range(12), key=lambda i: (-row[i], i))[:num_top]
        assert entry.token_ids == [own, *order]
        assert entry.logprobs == [row[own], *(row[i] for i in order)]
        assert entry.rank == 1 + sum(value > row[own] for value in row)


def test_each_row_reports_as_many_as_it_asks_for() -> None:
    report = LogprobReport.of(torch.randn(3, 9), torch.tensor([4, -1, 8]), 5)
    entries = report.to_host([0, 5, 2])
    assert [len(entry.token_ids) for entry in entries] == [1, 6, 3]
    assert [len(entry.logprobs) for entry in entries] == [1, 6, 3]


def test_row_of_no_numbers_harms_no_other() -> None:
    logprobs = torch.randn(3, 9)
    healthy = LogprobReport.of(logprobs, torch.tensor([1, 2, 3]), 4).to_host([4] * 3)
    logprobs[1] = torch.nan
    entries = LogprobReport.of(logprobs, torch.tensor([1, 2, 3]), 4).to_host([4] * 3)
    assert entries[::2] == healthy[::2]
    assert all(0 <= token_id < 9 for token_id in entries[1].token_ids)


def test_num_reported() -> None:
    assert [num_reported(wanted, 7, None) for wanted in (-1, 0, 5, 9)] == [7, 0, 5, 7]
    known_ids = torch.tensor([1, 2, 4, 6])
    assert [num_reported(wanted, 7, known_ids) for wanted in (-1, 0, 5)] == [4, 0, 4]
