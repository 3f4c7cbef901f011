"""The gated residual of training, forward and gradient, against its formulas."""

import pytest
import torch
from torch import Tensor

from outrider.ops.hyper_connection import (
    BLOCK_SIZE,
    inject_streams,
    read_streams,
    read_streams_naive,
)
from tests.ops.sequence_form import assert_same_gradients, form

__all__ = ["form"]

S, C, R = 3, 5, 2
EPS = 1e-3


def random_inputs(num_rows: int) -> list[Tensor]:
    shapes = [(num_rows, S, C), (S, C), (R, S * C), (S * C, R), (S, S * C), (num_rows, C)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("num_rows", [1, 7, BLOCK_SIZE, 2 * BLOCK_SIZE + 3])
def test_reading_and_injecting(num_rows: int, form: torch.dtype) -> None:
    """The streams get a gradient in three ways: as what is read, as gates, and passed through."""

    def block(*inputs: Tensor) -> Tensor:
        streams, weight, down, up, inject, output = inputs
        hidden, strength, same = read_streams(streams, weight, down, up, inject, EPS)
        return inject_streams(same, strength, output + hidden.tanh())

    def naive(*inputs: Tensor) -> Tensor:
        streams, weight, down, up, inject, output = inputs
        hidden, strength = read_streams_naive(streams, weight, down, up, inject, EPS)
        written = output + hidden.tanh()
        return streams + strength[:, :, None] * written[:, None, :]

    assert_same_gradients(block, naive, random_inputs(num_rows), form)


@pytest.mark.parametrize("num_rows", [1, BLOCK_SIZE + 1])
def test_the_final_mixer_injects_nothing(num_rows: int, form: torch.dtype) -> None:
    streams, weight, down, up, _, _ = random_inputs(num_rows)

    def read(*inputs: Tensor) -> Tensor:
        hidden, strength, _ = read_streams(*inputs, None, EPS)
        assert strength.shape == (num_rows, 0)
        return hidden

    def naive(*inputs: Tensor) -> Tensor:
        return read_streams_naive(*inputs, None, EPS)[0]

    assert_same_gradients(read, naive, [streams, weight, down, up], form)


def test_a_factor_of_zero_has_a_gradient(form: torch.dtype) -> None:
    """A norm whose stored weight is -1 multiplies by 0, and may still learn not to."""
    streams, weight, down, up, _, _ = random_inputs(9)
    weight[1] = -1.0

    def read(*inputs: Tensor) -> Tensor:
        return read_streams(*inputs, None, EPS)[0]

    def naive(*inputs: Tensor) -> Tensor:
        return read_streams_naive(*inputs, None, EPS)[0]

    assert_same_gradients(read, naive, [streams, weight, down, up], form)
