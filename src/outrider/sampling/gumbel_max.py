"""Draws token ids as the argmax of log probability plus Gumbel noise.

The `coupled` rule gives the same noise to draft, target and plain decoding, which ties their
choices together: two laws that are close mostly pick the same id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sample_with_gumbel(probs: Tensor, gumbel: Tensor) -> Tensor:
    """Returns argmax(log probs + gumbel) of each row, the lowest id on ties.

    An id of probability 0 is never returned, unless the whole row is 0 or not finite.

    Args:
        probs: [..., V] float, non-negative; a common factor of a row does not matter.
        gumbel: [..., V] float, finite. The sum is taken in the wider dtype of the two.

    Returns:
        [...] int64.
    """
    return (probs.log() + gumbel).argmax(-1)
