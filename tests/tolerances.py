"""How far two ways to compute the same numbers may lie apart."""

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
