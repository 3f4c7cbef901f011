"""Draws token ids from probabilities by the inverse of their cumulative distribution.

The proposer draws drafts with it; the acceptance rules draw recovered and bonus tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample_from_probs(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Returns, for each row, the id at which the cumulative distribution passes its uniform.

    The rows need not sum to one: each is scaled by its own total. An id of probability 0 is never
    returned. A row that holds no mass, or numbers that are not finite, has no right answer: some
    id of the vocabulary comes back, and the caller tells such rows apart beforehand.

    Args:
        probs: [..., V] float, non-negative.
        uniforms: [...] float in the open interval (0, 1), one per row. Sums are kept in the wider
            dtype of the two: float64 uniforms give a float64 distribution whatever `probs` is.

    Returns:
        [...] int64.
    """
    vocab_size = probs.shape[-1]
    cdf = probs.cumsum(-1, dtype=torch.promote_types(probs.dtype, uniforms.dtype))
    # A parallel scan adds in another order at each id, and may rise by a rounding error where the
    # probability is 0, or fall. With those ids taken out and the running maximum, the sum rises
    # only at ids that have mass, on every device.
    cdf = cdf.masked_fill_(probs <= 0, 0).cummax(-1).values.contiguous()
    total = cdf[..., -1:].contiguous()
    passed = torch.searchsorted(cdf, (uniforms.unsqueeze(-1) * total).contiguous(), right=True)
    last = torch.searchsorted(cdf, total)  # the last id that adds to the total
    return torch.minimum(passed, last).squeeze(-1).clamp_(max=vocab_size - 1)
