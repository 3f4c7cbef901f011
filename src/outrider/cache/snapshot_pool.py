"""Keeps recurrent states as they were at block boundaries, for requests that begin alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.batch import WindowSnapshots
from outrider.cache.groups import CacheGroup, GroupSpec
from outrider.cache.replay import fold_pending

LAST_STREAMS = "last_streams"
"""Group of the streams of the row before the boundary, which no request has a state of."""

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.batch import RowSpan, SnapshotRow


class SnapshotPool:
    """Slots for states; the one that was neither made nor used for the longest time goes first.

    A slot is free, reserved for a state that is being made, or published under the hash of all
    tokens that the state has seen.

    Args:
        specs: the recurrent groups as they are without pending rows.
        num_slots: states that are kept at once.
        dtype: of the tensors.
        device: of the tensors.
    """

    def __init__(
        self, specs: Sequence[GroupSpec], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.groups = {spec.name: CacheGroup(spec, num_slots, dtype, device) for spec in specs}
        self._device = device
        self._free = list(range(num_slots - 1, -1, -1))
        self._reserved: set[int] = set()
        # Oldest first.
        self._published: dict[bytes, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(group.num_bytes for group in self.groups.values())

    @property
    def num_published(self) -> int:
        """States that can be found."""
        return len(self._published)

    def __contains__(self, content: bytes) -> bool:
        return content in self._published

    def reserve(self) -> int | None:
        """A slot for a new state, which may cost an old one; None where all are being made."""
        if not self._free:
            if not self._published:
                return None
            self.drop(next(iter(self._published)))
        slot = self._free.pop()
        self._reserved.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Takes a reserved slot back without a state."""
        self._reserved.remove(slot)
        self._free.append(slot)

    def publish(self, slot: int, content: bytes) -> None:
        """Lets the state of a reserved slot be found, unless there is one like it."""
        if content in self._published:
            self.release(slot)
        else:
            self._reserved.remove(slot)
            self._published[content] = slot
        self.touch(content)

    def touch(self, content: bytes) -> None:
        """Makes a published state the one that was used last."""
        self._published[content] = self._published.pop(content)

    def drop(self, content: bytes) -> None:
        """Forgets a state; one that is not there is no error."""
        slot = self._published.pop(content, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Forgets all states that are published."""
        for content in list(self._published):
            self.drop(content)

    def save(
        self,
        groups: Mapping[str, CacheGroup],
        state_slots: Mapping[str, Tensor],
        slots: Sequence[int],
        num_pending_rows: Sequence[int],
    ) -> None:
        """Writes the states of n requests, each with its first pending rows folded into it.

        Args:
            groups: what the requests have; unchanged.
            state_slots: group name -> [n] int64, where theirs lie.
            slots: n of this pool.
            num_pending_rows: of each request, 0..P.
        """
        to = torch.tensor(slots, device=self._device)
        counts = torch.tensor(num_pending_rows, device=self._device)
        for name, source in state_slots.items():
            kept = self.groups[name].tensors
            for tensor_name, folded in fold_pending(
                groups[name].tensors, source, counts, kept["conv"].shape[2]
            ).items():
                kept[tensor_name][:, to] = folded

    def restore(
        self, content: bytes, groups: Mapping[str, CacheGroup], state_slots: Mapping[str, Tensor]
    ) -> None:
        """Gives a request, whose slots are cleared, a published state.

        Args:
            content: what the state has seen.
            groups: what requests have; modified.
            state_slots: group name -> [1] int64, where the request's lie.
        """
        slot = self._published[content]
        self.touch(content)
        for name, to in state_slots.items():
            for tensor_name, kept in self.groups[name].tensors.items():
                # A window of a request has room for pending rows behind what is kept here.
                store = groups[name].tensors[tensor_name]
                if tensor_name == "conv":
                    store = store[:, :, : kept.shape[2]]
                if kept.numel():
                    store[:, to] = kept[:, slot : slot + 1]

    def keep_streams(self, slots: Sequence[int], streams: Tensor) -> None:
        """Keeps the streams [n, W] of the rows before the boundaries, where there is a head."""
        if LAST_STREAMS in self.groups:
            self.groups[LAST_STREAMS].tensors["streams"][0, list(slots)] = streams

    def last_streams(self, content: bytes) -> Tensor:
        """The streams [W] of the row before a published state, a copy."""
        return self.groups[LAST_STREAMS].tensors["streams"][0, self._published[content]].clone()

    def check_integrity(self) -> None:
        """Every slot is free, reserved or published, and nothing twice."""
        slots = [*self._free, *self._reserved, *self._published.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a snapshot is leaked or kept twice"


def window_snapshots(
    members: Sequence[int],
    spans: Sequence[RowSpan],
    wanted: Sequence[SnapshotRow],
    device: torch.device,
) -> WindowSnapshots | None:
    """The snapshots that the layers have to make while a window runs, or None.

    Those at the end of the certain rows or among the drafts are made afterwards, from the state
    that the pass has folded and the rows that it has left pending.

    Args:
        members: places of the window's requests in the batch.
        spans: of the batch.
        wanted: of the batch.
        device: of the caches.
    """
    within = [
        (members.index(one.index), one.num_rows, one.slot)
        for one in wanted
        if one.index in members and one.num_rows < spans[one.index].num_certain_rows
    ]
    if not within:
        return None
    requests, num_rows, slots = torch.tensor(within, device=device).T
    return WindowSnapshots(tuple((i, count) for i, count, _ in within), requests, num_rows, slots)
