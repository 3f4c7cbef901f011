"""The rows that logits processors change, and what a processor is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ProcessedRows:
    """The n rows that some processor changes.

    Attributes:
        place: [n] int64, of the row's request among the P that use a processor.
        depth: [n] int64, how many drafts come before the row.
        draft_ids: [P, K] int64, drafts of each request; below 0 nothing was drawn.
    """

    place: Tensor
    depth: Tensor
    draft_ids: Tensor


class LogitsProcessor(Protocol):
    """One step on the way from the model's logits to those that are sampled from."""

    def apply(self, scores: Tensor, rows: ProcessedRows) -> Tensor:
        """Returns the new [n, V] of the rows; may write into `scores`, which nobody else holds."""
        ...
