"""The gated delta rule by chunks and by single rows, against the loop over rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.gated_delta_rule import (
    CHUNK_SIZE,
    chunk_gated_delta_rule,
    gated_delta_rule_naive,
    recurrent_gated_delta_rule,
)
from tests.tolerances import assert_near

B, H, DK, DV = 2, 3, 5, 7
DTYPES = [torch.float32, torch.float64]
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def random_rows(num_rows: int, dtype: torch.dtype = torch.float64) -> Rows:
    q, k = (F.normalize(torch.randn(B, num_rows, H, DK, dtype=dtype), dim=-1) for _ in range(2))
    v = torch.randn(B, num_rows, H, DV, dtype=dtype)
    g = -F.softplus(torch.randn(B, num_rows, H, dtype=dtype))
    return q / DK**0.5, k, v, g, torch.rand(B, num_rows, H, dtype=dtype)


def random_state(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, H, DK, DV, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 200])
def test_chunks_equal_the_loop(num_rows: int, dtype: torch.dtype) -> None:
    rows, state = random_rows(num_rows, dtype), random_state(dtype)
    before = state.clone()
    outputs, after = chunk_gated_delta_rule(*rows, state)
    expected, expected_after = gated_delta_rule_naive(*rows, state)
    assert outputs.dtype == after.dtype == dtype
    assert_near(outputs, expected)
    assert_near(after, expected_after)
    assert torch.equal(state, before)


def test_no_state_is_the_zero_state() -> None:
    rows = random_rows(70)
    for actual, expected in zip(
        chunk_gated_delta_rule(*rows),
        gated_delta_rule_naive(*rows, torch.zeros(B, H, DK, DV, dtype=torch.float64)),
        strict=True,
    ):
        assert_near(actual, expected)


@pytest.mark.parametrize("num_rows", [1, 5, 17, 64, 65, 150])
@pytest.mark.parametrize("surplus", [1, 8, 63, 64, 66, 130])
def test_surplus_key_rows_come_first_and_yield_no_output(num_rows: int, surplus: int) -> None:
    q, *keys = random_rows(surplus + num_rows)
    state = random_state()
    outputs, after = chunk_gated_delta_rule(q[:, surplus:], *keys, state)
    expected, expected_after = gated_delta_rule_naive(q, *keys, state)
    assert outputs.shape[1] == num_rows
    assert_near(outputs, expected[:, surplus:])
    assert_near(after, expected_after)


@pytest.mark.parametrize("num_rows", [1, 9, 64, 100])
def test_rows_can_be_folded_without_any_query(num_rows: int) -> None:
    q, *keys = random_rows(num_rows)
    state = random_state()
    outputs, after = chunk_gated_delta_rule(q[:, :0], *keys, state)
    assert outputs.shape == (B, 0, H, DV)
    assert_near(after, gated_delta_rule_naive(q, *keys, state)[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4, 9, 17, CHUNK_SIZE])
def test_only_folded_rows_enter_the_state(num_rows: int, dtype: torch.dtype) -> None:
    """Drafts act on the rows after them, and the state is that after the rows before them."""
    rows, state = random_rows(num_rows, dtype), random_state(dtype)
    expected, _ = gated_delta_rule_naive(*rows, state)
    states = [state]
    for t in range(num_rows):
        states.append(gated_delta_rule_naive(*(x[:, t : t + 1] for x in rows), states[-1])[1])
    for first in range(num_rows + 1):
        # The two requests fold different numbers of rows.
        counts = torch.tensor([first, num_rows - first])
        is_folded = torch.arange(num_rows) < counts[:, None]
        outputs, after = chunk_gated_delta_rule(*rows, state, is_folded)
        assert_near(outputs, expected)
        assert_near(after[0], states[first][0])
        assert_near(after[1], states[num_rows - first][1])


def test_pending_rows_are_folded_with_certain_rows_before_drafts() -> None:
    """A pass of an engine: 3 pending rows of which some were kept, 2 certain rows, 2 drafts."""
    q, *keys = random_rows(7)
    state = random_state()
    for num_kept in range(4):
        is_kept = torch.arange(3) < num_kept
        is_used = torch.cat([is_kept, torch.ones(4, dtype=torch.bool)])
        chosen = [x[:, is_used] for x in keys]
        masked = [torch.where(is_used.view(1, -1, *[1] * (x.dim() - 2)), x, 0.0) for x in keys]
        is_folded = torch.tensor([True] * 5 + [False] * 2).expand(B, -1)
        outputs, after = chunk_gated_delta_rule(q[:, 3:], *masked, state, is_folded)
        expected, _ = gated_delta_rule_naive(q[:, is_used], *chosen, state)
        certain = [x[:, : num_kept + 2] for x in (q[:, is_used], *chosen)]
        assert_near(outputs, expected[:, num_kept:])
        assert_near(after, gated_delta_rule_naive(*certain, state)[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 8, 16, 17, 64, 65])
def test_no_decay_and_no_write_is_the_identity_bit_for_bit(
    num_rows: int, dtype: torch.dtype
) -> None:
    q, k, v, g, beta = random_rows(num_rows, dtype)
    state = random_state(dtype)
    nothing = (q, k, v, torch.zeros_like(g), torch.zeros_like(beta))
    assert torch.equal(chunk_gated_delta_rule(*nothing, state)[1], state)
    one = (x[:, :1] for x in nothing)
    assert torch.equal(recurrent_gated_delta_rule(*one, state)[1], state)
    # Either alone is not.
    assert not torch.allclose(chunk_gated_delta_rule(*nothing[:3], g, nothing[4], state)[1], state)
    assert not torch.allclose(chunk_gated_delta_rule(*nothing[:4], beta, state)[1], state)


def test_rows_that_are_not_folded_leave_no_bit() -> None:
    rows, state = random_rows(6), random_state()
    is_folded = torch.zeros(B, 6, dtype=torch.bool)
    assert torch.equal(chunk_gated_delta_rule(*rows, state, is_folded)[1], state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_row_equals_the_loop(dtype: torch.dtype) -> None:
    rows, state = random_rows(1, dtype), random_state(dtype)
    before = state.clone()
    outputs, after = recurrent_gated_delta_rule(*rows, state)
    expected, expected_after = gated_delta_rule_naive(*rows, state)
    assert outputs.shape == expected.shape
    assert_near(outputs, expected)
    assert_near(after, expected_after)
    assert torch.equal(state, before)


@pytest.mark.parametrize("num_rows", [1, 9, 20, 70])
def test_gradients_equal_those_of_the_loop(num_rows: int) -> None:
    rows, state = random_rows(num_rows), random_state()
    weights = torch.randn(B, num_rows, H, DV, dtype=torch.float64), random_state()

    def gradients(function: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (*rows, state)]
        outputs, after = function(*leaves)  # type: ignore[operator]
        ((outputs * weights[0]).sum() + (after * weights[1]).sum()).backward()
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    for actual, expected in zip(
        gradients(chunk_gated_delta_rule), gradients(gated_delta_rule_naive), strict=True
    ):
        assert expected.abs().max() > 0.01
        assert_near(actual, expected, factor=10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [-40.0, -300.0, -1e4])
def test_strong_decay_forgets_and_does_not_overflow(decay: float, dtype: torch.dtype) -> None:
    """Differences of running sums keep fewer digits of g where the sums are large."""
    q, k, v, g, beta = random_rows(100, dtype)
    g[:, ::3] = decay
    state = random_state(dtype)
    outputs, after = chunk_gated_delta_rule(q, k, v, g, beta, state)
    expected, expected_after = gated_delta_rule_naive(q, k, v, g, beta, state)
    factor = max(1.0, abs(decay))
    assert_near(outputs, expected, factor)
    assert_near(after, expected_after, factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [9, 13, 16, 17, 64])
def test_one_key_over_and_over(num_rows: int, dtype: torch.dtype) -> None:
    """A repeated token without decay: the triangular system at its worst."""
    q, k, v, g, beta = random_rows(num_rows, dtype)
    k = k[:, :1].expand_as(k)
    g, beta = torch.zeros_like(g), torch.full_like(beta, 0.999)
    state = random_state(dtype)
    outputs, after = chunk_gated_delta_rule(q, k, v, g, beta, state)
    expected, expected_after = gated_delta_rule_naive(q, k, v, g, beta, state)
    assert_near(outputs, expected)
    assert_near(after, expected_after)


def test_requests_do_not_touch_each_other() -> None:
    rows, state = random_rows(9), random_state()
    for x in rows:
        x[1] = torch.nan
    outputs, after = chunk_gated_delta_rule(*rows, state, torch.ones(B, 9, dtype=torch.bool))
    expected, expected_after = gated_delta_rule_naive(*(x[:1] for x in rows), state[:1])
    assert_near(outputs[:1], expected)
    assert_near(after[:1], expected_after)
