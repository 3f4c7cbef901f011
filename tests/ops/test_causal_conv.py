"""The depthwise convolution, and its window that forgets rejected columns."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.causal_conv import causal_conv, causal_conv_naive, roll_window
from tests.tolerances import assert_near

B, CHANNELS = 2, 5
SHAPES = list(itertools.product([1, 2, 3, 4], [1, 2, 3, 5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 9, 40])
@pytest.mark.parametrize(("taps", "dilation"), SHAPES)
def test_equals_the_loop(taps: int, dilation: int, num_rows: int, dtype: torch.dtype) -> None:
    columns = torch.randn(B, (taps - 1) * dilation + num_rows, CHANNELS, dtype=dtype)
    weight = torch.randn(CHANNELS, taps, dtype=dtype)
    output = causal_conv(columns, weight, dilation)
    assert output.shape == (B, num_rows, CHANNELS)
    assert output.dtype == dtype
    assert_near(output, causal_conv_naive(columns, weight, dilation))


def test_equals_torch_and_the_last_tap_is_the_row_itself() -> None:
    columns = torch.randn(B, 3 * 3 + 20, CHANNELS, dtype=torch.float64)
    weight = torch.randn(CHANNELS, 4, dtype=torch.float64)
    expected = F.conv1d(columns.transpose(1, 2), weight[:, None], dilation=3, groups=CHANNELS)
    assert_near(causal_conv(columns, weight, 3), expected.transpose(1, 2))
    only_last = torch.zeros_like(weight)
    only_last[:, -1] = 1.0
    assert torch.equal(causal_conv(columns, only_last, 3), columns[:, 9:])


def test_rows_after_a_row_do_not_reach_it() -> None:
    columns = torch.randn(B, 6 + 10, CHANNELS)
    weight = torch.randn(CHANNELS, 4)
    expected = causal_conv(columns, weight, 2)
    columns[:, 6 + 4 :] = torch.nan
    output = causal_conv(columns, weight, 2)
    assert torch.equal(output[:, :4], expected[:, :4])
    assert output[:, 4:].isnan().all()


@pytest.mark.parametrize(("taps", "dilation"), [(1, 1), (3, 1), (4, 3)])
def test_gradients_equal_those_of_the_loop(taps: int, dilation: int) -> None:
    columns = torch.randn(B, (taps - 1) * dilation + 11, CHANNELS, dtype=torch.float64)
    weight = torch.randn(CHANNELS, taps, dtype=torch.float64)
    factor = torch.randn(B, 11, CHANNELS, dtype=torch.float64)

    def gradients(function: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (columns, weight)]
        (function(*leaves, dilation) * factor).sum().backward()  # type: ignore[operator]
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    for actual, expected in zip(gradients(causal_conv), gradients(causal_conv_naive), strict=True):
        assert_near(actual, expected)


class ListedWindow:
    """What `roll_window` does, as lists of one request: committed columns, then drafts."""

    def __init__(self, history: int) -> None:
        self.history = history
        self.committed = [0.0] * history
        self.drafts: list[float] = []

    def roll(self, rows: list[float], num_kept: int, num_certain: int) -> list[float]:
        """Keeps so many drafts of the last window; returns the columns of this one."""
        self.committed += self.drafts[:num_kept]
        columns = self.committed[len(self.committed) - self.history :] + rows
        self.committed += rows[:num_certain]
        self.drafts = rows[num_certain:]
        return columns


def roll_padded(
    window: Tensor,
    rows: list[list[float]],
    num_kept: list[int],
    num_certain: list[int],
    history: int,
) -> tuple[Tensor, Tensor]:
    """`roll_window` over rows padded with NaN."""
    length = max(map(len, rows))
    padded = torch.tensor([row + [torch.nan] * (length - len(row)) for row in rows])[..., None]
    return roll_window(window, padded, torch.tensor(num_kept), torch.tensor(num_certain), history)


@pytest.mark.parametrize("history", [0, 1, 3, 9])
@pytest.mark.parametrize("pending", [0, 1, 2, 4])
def test_window_is_that_of_the_columns_kept(history: int, pending: int) -> None:
    """Every pair (drafts of a window, drafts kept of it), twice in a row, ragged over requests."""
    splits = [(drafts, kept) for drafts in range(pending + 1) for kept in range(drafts + 1)]
    plans = list(itertools.product(splits, splits))
    listed = [ListedWindow(history) for _ in plans]
    window = torch.zeros(len(plans), history + pending, 1)
    values = itertools.count(1)
    num_kept = [0] * len(plans)
    # A chunk of a prompt, the two windows of the plan, and a plain step to read the last kept ones.
    for step in range(4):
        drafts = [(0, first[0], second[0], 0)[step] for first, second in plans]
        certain = [(1 + i % 4 if step == 0 else 1 + i % 2) for i in range(len(plans))]
        rows = [
            [float(next(values)) for _ in range(c + d)]
            for c, d in zip(certain, drafts, strict=True)
        ]
        columns, window = roll_padded(window, rows, num_kept, certain, history)
        assert window.shape == (len(plans), history + pending, 1)
        for i, (one, row, kept, sure) in enumerate(
            zip(listed, rows, num_kept, certain, strict=True)
        ):
            expected = one.roll(row, kept, sure)
            assert columns[i, : len(expected), 0].tolist() == expected
            stored = (one.committed[len(one.committed) - history :] if history else []) + one.drafts
            assert window[i, : len(stored), 0].tolist() == stored
        num_kept = [(0, first[1], second[1], 0)[step] for first, second in plans]


def test_window_of_no_row_drops_the_rejected_columns() -> None:
    window = torch.arange(10.0).view(2, 5, 1)
    none = torch.zeros(2, dtype=torch.int64)
    columns, stored = roll_window(window, window[:, :0], torch.tensor([0, 2]), none, 3)
    assert columns[..., 0].tolist() == [[0, 1, 2], [7, 8, 9]]
    assert stored[:, :3, 0].tolist() == [[0, 1, 2], [7, 8, 9]]


def test_window_is_not_modified() -> None:
    window, rows = torch.randn(2, 5, 1), torch.randn(2, 3, 1)
    before = window.clone()
    roll_window(window, rows, torch.tensor([1, 2]), torch.tensor([1, 3]), 3)
    assert torch.equal(window, before)
