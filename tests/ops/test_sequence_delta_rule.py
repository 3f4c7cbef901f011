"""The delta rule of training, forward and gradient, against the loop over rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.gated_delta_rule import (
    SEQUENCE_CHUNK_SIZE,
    gated_delta_rule_naive,
    sequence_gated_delta_rule,
)
from tests.ops.sequence_form import assert_same_gradients, form

__all__ = ["form"]

B = 2


def random_rows(length: int, key_heads: int, heads: int, dk: int, dv: int) -> list[Tensor]:
    double = torch.float64
    q, k = (F.normalize(torch.randn(B, length, key_heads, dk, dtype=double), dim=-1) for _ in "qk")
    v = torch.randn(B, length, heads, dv, dtype=double)
    g = -F.softplus(torch.randn(B, length, heads, dtype=double))
    return [q / dk**0.5, k, v, g, torch.rand(B, length, heads, dtype=double)]


def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // q.shape[2], dim=2) for x in (q, k))
    state = v.new_zeros(len(v), heads, k.shape[-1], v.shape[-1])
    return gated_delta_rule_naive(q, k, v, g, beta, state)[0]


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 2 * SEQUENCE_CHUNK_SIZE, 71])
@pytest.mark.parametrize(("key_heads", "heads"), [(2, 2), (1, 3), (2, 4)])
def test_it_equals_the_loop(length: int, key_heads: int, heads: int, form: torch.dtype) -> None:
    rows = random_rows(length, key_heads, heads, 16, 16)
    assert_same_gradients(sequence_gated_delta_rule, naive, rows, form)


@pytest.mark.parametrize(("dk", "dv"), [(5, 7), (16, 48), (48, 16), (16, 20)])
def test_heads_of_other_widths(dk: int, dv: int, form: torch.dtype) -> None:
    assert_same_gradients(sequence_gated_delta_rule, naive, random_rows(40, 1, 2, dk, dv), form)


def test_rows_that_are_parts_of_wider_tensors(form: torch.dtype) -> None:
    """As in the layer, where queries, keys and values are cut out of one product."""
    q, k, v, g, beta = random_rows(37, 2, 4, 16, 32)

    def cut(both: Tensor, wide: Tensor, gates: Tensor) -> Tensor:
        q, k = both.chunk(2, dim=2)
        return sequence_gated_delta_rule(
            q, k, wide[..., 3:-2].unflatten(-1, (4, 32)), gates[..., 0], gates[..., 1]
        )

    def cut_naive(both: Tensor, wide: Tensor, gates: Tensor) -> Tensor:
        q, k = both.chunk(2, dim=2)
        return naive(q, k, wide[..., 3:-2].unflatten(-1, (4, 32)), gates[..., 0], gates[..., 1])

    wide = F.pad(v.flatten(-2), (3, 2))
    inputs = [torch.cat([q, k], dim=2), wide, torch.stack([g, beta], dim=-1)]
    assert_same_gradients(cut, cut_naive, inputs, form)


@pytest.mark.parametrize("length", [33, 2 * SEQUENCE_CHUNK_SIZE + 7])
def test_weak_decay(length: int, form: torch.dtype) -> None:
    """The state lasts over several chunks, and so does what reaches a gradient through it."""
    q, k, v, g, beta = random_rows(length, 2, 4, 16, 32)
    rows = [q, k, v, g * 0.02, beta]
    assert_same_gradients(sequence_gated_delta_rule, naive, rows, form)


@pytest.mark.parametrize("decay", [-40.0, -300.0])
def test_strong_decay(decay: float, form: torch.dtype) -> None:
    rows = random_rows(70, 1, 1, 16, 16)
    rows[3][:, ::3] = decay
    # Differences of running sums keep fewer digits of g where the sums are large.
    assert_same_gradients(sequence_gated_delta_rule, naive, rows, form, factor=10 * abs(decay))


def test_one_key_over_and_over(form: torch.dtype) -> None:
    """A repeated token without decay: the triangular system at its worst."""
    q, k, v, g, beta = random_rows(64, 1, 2, 16, 16)
    rows = [q, k[:, :1].expand_as(k), v, torch.zeros_like(g), torch.full_like(beta, 0.999)]
    assert_same_gradients(sequence_gated_delta_rule, naive, rows, form, factor=100)


def test_rows_of_zeros_leave_no_trace(form: torch.dtype) -> None:
    """No write strength and no decay: what a padded row is."""
    rows = [x.to(form) for x in random_rows(40, 1, 2, 16, 16)]
    longer = [torch.cat([x[:, :20], torch.zeros_like(x), x[:, 20:]], dim=1) for x in rows]
    expected = sequence_gated_delta_rule(*rows)
    actual = sequence_gated_delta_rule(*longer)
    kept = torch.cat([actual[:, :20], actual[:, -20:]], dim=1)
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)
