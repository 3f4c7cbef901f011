"""Convolution, normalised rows, experts and cross entropy of training, forward and gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.causal_conv import causal_conv_naive, causal_conv_silu
from outrider.ops.cross_entropy import linear_cross_entropy
from outrider.ops.moe import (
    gated_product,
    route,
    routed_experts_naive,
    routed_experts_sequence,
)
from outrider.ops.normalise import (
    gated_rms_rows,
    gated_rms_rows_naive,
    rms_rows,
    rms_rows_naive,
    unit_rows,
    unit_rows_naive,
)
from tests.ops.sequence_form import assert_same_gradients, form
from tests.tolerances import assert_near

__all__ = ["form"]

EPS = 1e-3


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 3, 64, 127, 129, 200])
@pytest.mark.parametrize(("taps", "dilation"), [(1, 1), (4, 1), (2, 3), (4, 3)])
def test_causal_conv(length: int, taps: int, dilation: int, form: torch.dtype) -> None:
    def conv(rows: Tensor, weight: Tensor) -> Tensor:
        return causal_conv_silu(rows[..., 1:-2], weight, dilation)

    def naive(rows: Tensor, weight: Tensor) -> Tensor:
        columns = F.pad(rows[..., 1:-2], (0, 0, (taps - 1) * dilation, 0))
        return F.silu(causal_conv_naive(columns, weight, dilation))

    assert_same_gradients(conv, naive, [random(2, length, 9), random(6, taps)], form)


@pytest.mark.parametrize("shape", [(7,), (4, 5), (2, 3, 5), (2, 70, 3, 5)])
def test_unit_rows(shape: tuple[int, ...], form: torch.dtype) -> None:
    def unit(x: Tensor) -> Tensor:
        return unit_rows(x, EPS)

    assert_same_gradients(unit, lambda x: unit_rows_naive(x, EPS), [random(*shape)], form)


@pytest.mark.parametrize(
    ("shape", "factor"), [((4, 5), (5,)), ((2, 9, 3, 5), (5,)), ((9, 3, 5), (3, 5))]
)
def test_rms_rows(shape: tuple[int, ...], factor: tuple[int, ...], form: torch.dtype) -> None:
    inputs = [random(*shape), random(*factor)]

    def normed(x: Tensor, f: Tensor) -> Tensor:
        return rms_rows(x, f, EPS)

    assert_same_gradients(normed, lambda x, f: rms_rows_naive(x, f, EPS), inputs, form)


@pytest.mark.parametrize("is_silu", [True, False])
def test_gated_rms_rows(is_silu: bool, form: torch.dtype) -> None:
    inputs = [random(2, 9, 3, 5), random(5), random(2, 9, 17)]

    def gated(x: Tensor, f: Tensor, wide: Tensor) -> Tensor:
        gate = wide[..., 1:-1].unflatten(-1, (3, 5))
        return gated_rms_rows(x, f, gate, EPS, is_silu=is_silu)

    def naive(x: Tensor, f: Tensor, wide: Tensor) -> Tensor:
        gate = wide[..., 1:-1].unflatten(-1, (3, 5))
        return gated_rms_rows_naive(x, f, gate, EPS, is_silu=is_silu)

    assert_same_gradients(gated, naive, inputs, form)


def test_gates_at_their_ends(form: torch.dtype) -> None:
    """The native sigmoid is flat beyond +-60; up to there and beyond it gives what sigmoid does."""
    gate = torch.linspace(-120, 120, 97, dtype=torch.float64)[:, None].expand(97, 4)
    product = gated_product(gate.to(form).contiguous(), torch.ones(97, 4, dtype=form))
    assert_near(product, F.silu(gate).to(form))


def test_gated_product(form: torch.dtype) -> None:
    inputs = [random(33, 5), random(33, 5)]
    assert_same_gradients(gated_product, lambda gate, up: F.silu(gate) * up, inputs, form)


@pytest.mark.parametrize(("num_rows", "num_experts", "k"), [(1, 1, 1), (11, 5, 2), (300, 4, 3)])
def test_routed_experts(num_rows: int, num_experts: int, k: int, form: torch.dtype) -> None:
    ids, share, _ = route(random(num_rows, num_experts), k, normalise=True)
    if num_experts == 5:
        ids = ids.masked_fill(ids == 3, 4)  # one expert has no row, so no gradient
    inputs = [random(num_rows, 6), share, random(num_experts, 10, 6), random(num_experts, 6, 5)]

    def grouped(hidden: Tensor, share: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return routed_experts_sequence(hidden, ids, share, gate_up, down)

    def naive(hidden: Tensor, share: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return routed_experts_naive(hidden, ids, share, gate_up, down)

    assert_same_gradients(grouped, naive, inputs, form)


@pytest.mark.parametrize("num_rows", [1, 130, 300])
def test_cross_entropy(num_rows: int, form: torch.dtype) -> None:
    targets = torch.randint(23, (num_rows,))

    def fused(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets)

    def naive(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.t(), targets)

    assert_same_gradients(fused, naive, [random(num_rows, 6), random(23, 6) * 5], form)


def test_cross_entropy_of_a_certain_wrong_answer(form: torch.dtype) -> None:
    """A target whose probability is below every float32 still has its loss."""
    hidden = torch.tensor([[1.0]], dtype=form)
    weight = torch.tensor([[500.0], [0.0], [-500.0]], dtype=form)
    assert float(linear_cross_entropy(hidden, weight, torch.tensor([2]))) == pytest.approx(1000.0)


def test_cross_entropy_computes_only_the_gradients_that_are_wanted(form: torch.dtype) -> None:
    """A frozen vocabulary, as when a head is tuned alone, and no gradient at all."""
    targets = torch.randint(7, (5,))
    hidden = torch.randn(5, 4, dtype=form, requires_grad=True)
    weight = torch.randn(7, 4, dtype=form)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    expected = F.cross_entropy(hidden @ weight.t(), targets)
    (gradient,) = torch.autograd.grad(expected, hidden)
    assert hidden.grad is not None
    assert_near(hidden.grad, gradient)
    assert weight.grad is None
    with torch.no_grad():
        assert_near(linear_cross_entropy(hidden, weight, targets), expected)
