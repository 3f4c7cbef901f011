"""How far two ways to compute the same numbers may lie apart."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Sums of some hundred terms of size one, in another order: a few ulp each way and not more.
# float32: 1.2e-7 an ulp, so 2e-5 is 170 of them. float64: 2.2e-16 an ulp; room for the chain of
# chunks and the powers of the triangular system, and far below any error of the formula.
ATOL = {torch.float32: 2e-5, torch.float64: 1e-12}


def assert_near(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Equal within the table above, relative to the size of what is expected; no NaN passes."""
    atol = ATOL[expected.dtype] * factor
    torch.testing.assert_close(actual, expected, rtol=atol, atol=atol)


def largest_gap(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference within pairs of tensors; infinite if one is NaN.

    A NaN would be lost on its way: Python's `max(0.0, nan)` is 0.0.
    """
    gaps = [(one - other).abs().max().nan_to_num(nan=torch.inf) for one, other in pairs]
    return max(map(float, gaps), default=0.0)
