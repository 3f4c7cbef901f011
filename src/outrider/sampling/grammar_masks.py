"""Masks of rows whose text has to follow a grammar: from bits on the host to logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int32
    from numpy.typing import NDArray


@dataclass(frozen=True)
class GrammarMasks:
    """What the grammars of n rows let pass; of rows without one there is nothing here.

    Attributes:
        index: [m] int64, which of the n rows have a mask.
        allowed: [m, V] bool.
    """

    index: Tensor
    allowed: Tensor

    @classmethod
    def of(
        cls, masks: Sequence[NDArray[int32] | None], vocab_size: int, device: torch.device
    ) -> GrammarMasks | None:
        """Brings masks to the device, None where no row has one.

        Args:
            masks: of n rows, as `OutputGrammar.allowed_after` gives them.
            vocab_size: V.
            device: of the logits.
        """
        rows = [row for row, mask in enumerate(masks) if mask is not None]
        if not rows:
            return None
        packed = np.stack([mask for mask in masks if mask is not None]).view(np.uint8)
        as_bytes = torch.from_numpy(packed).to(device).long()
        allowed = _bits_of_bytes(device)[as_bytes].flatten(1)[:, :vocab_size]
        return cls(torch.tensor(rows, device=device), allowed)

    def exclude(self, scores: Tensor) -> Tensor:
        """[n, V] to a new [n, V], -inf where a grammar lets nothing pass."""
        return scores.index_copy(
            0, self.index, scores[self.index].masked_fill(~self.allowed, -torch.inf)
        )

    def restore(self, scores: Tensor, before: Tensor) -> Tensor:
        """Takes rows that lost all their ids after the masks back to what they were.

        A bad word or `min_tokens` may exclude all that a grammar allows; the grammar then decides
        alone, or the text could not go on.

        Args:
            scores: [n, V] after the processors.
            before: [n, V] after the masks.
        """
        masked = scores[self.index]
        is_dead = (masked == -torch.inf).all(-1, keepdim=True)
        return scores.index_copy(0, self.index, torch.where(is_dead, before[self.index], masked))


@cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """[256, 8] bool: the bits of each byte, the lowest first."""
    return (
        torch.arange(256, device=device).unsqueeze(-1) >> torch.arange(8, device=device)
    ) % 2 > 0
