"""Cache groups: tensors that share one block table or one table of state slots.

Each tensor declares how it comes back after drafts were rejected; one that declares nothing
cannot be built.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Rollback(StrEnum):
    """How a kind of state forgets rejected rows.

    TRUNCATE: the length goes back; slots past it are never read and later overwritten.
    REPLAY: one committed state and the inputs of the last window; the next pass folds those that
        were kept.
    REGATHER: derived from something that rolls back by itself, and formed anew from it.
    """

    TRUNCATE = "truncate"
    REPLAY = "replay"
    REGATHER = "regather"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a group.

    Attributes:
        name: unique in the group.
        shape: of one slot.
        rollback: how it forgets rejected rows.
        tokens_per_slot: positions that share a slot (paged groups only).
    """

    name: str
    shape: tuple[int, ...]
    rollback: Rollback
    tokens_per_slot: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.rollback, Rollback):
            raise TypeError(f"state {self.name!r} declares no rollback: {self.rollback!r}")


@dataclass(frozen=True)
class GroupSpec:
    """One cache group.

    Attributes:
        name: key of its metadata in a batch.
        is_paged: addressed by block and position; otherwise one state slot a request.
        num_layers: layers that have these tensors.
        tensors: what a layer has.
        ratio: positions of an index block, for a group that pools keys; 0 otherwise.
        dense_limit: visible positions up to which pooled keys are not read.
        reads_next_token: a row is made of the token after it too, so that the last row of a block
            depends on more than the tokens up to the block's end.
    """

    name: str
    is_paged: bool
    num_layers: int
    tensors: tuple[TensorSpec, ...]
    ratio: int = 0
    dense_limit: int = 0
    reads_next_token: bool = False

    def num_bytes(self, num_slots: int, dtype: torch.dtype) -> int:
        """Bytes of so many tokens (paged) or requests (state), over all layers."""
        total = 0
        for tensor in self.tensors:
            size = self.num_layers * dtype.itemsize * (num_slots // tensor.tokens_per_slot)
            for extent in tensor.shape:
                size *= extent
            total += size
        return total


class CacheGroup:
    """The storage of one group.

    Args:
        spec: what it holds.
        num_slots: slots of a tensor with one token (or request) per slot.
        dtype: of every tensor.
        device: of every tensor.
    """

    def __init__(
        self, spec: GroupSpec, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.num_slots = num_slots
        # Zeros: what no request has written may be read under a mask, and 0 * NaN is NaN.
        self.tensors: dict[str, Tensor] = {
            tensor.name: torch.zeros(
                spec.num_layers,
                num_slots // tensor.tokens_per_slot,
                *tensor.shape,
                dtype=dtype,
                device=device,
            )
            for tensor in spec.tensors
        }

    def layer(self, index: int) -> dict[str, Tensor]:
        """The tensors of one layer, without the layer dimension."""
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    def clear(self, slots: Tensor) -> None:
        """Zeroes slots [n] int64 of every layer: the state before the first token."""
        for spec in self.spec.tensors:
            self.tensors[spec.name][:, slots[:: spec.tokens_per_slot] // spec.tokens_per_slot] = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies slots [n] int64 of every layer to others; whole blocks, in order."""
        for spec in self.spec.tensors:
            tensor, step = self.tensors[spec.name], spec.tokens_per_slot
            tensor[:, target[::step] // step] = tensor[:, source[::step] // step]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
