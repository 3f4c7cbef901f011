"""Finds what the caches still hold of a sequence, and lets a new request begin behind it.

A request can begin at a block boundary b where three things are there: the blocks of the target
before b, a snapshot of the recurrent states at b, and, if it will draft, the blocks of the head.

    what              is made of                     found by
    target's block    the tokens up to its end       their hash
    snapshot          the tokens up to b             their hash
    head's block      these, and the token after     their hash and that token

Row b - 1 of the head was made with the token x_b of the request that left it. The blocks before
are shared as they are; of the last one the new request gets a copy of its own, in which it builds
that row again from the streams X_{b-1} of the snapshot and its own x_b.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.cache.block_table import BlockTable
    from outrider.cache.groups import CacheGroup
    from outrider.cache.snapshot_pool import SnapshotPool
    from outrider.cache.state_pool import StatePool


@dataclass(frozen=True)
class PrefixHit:
    """Where a new request can begin, and with what.

    Attributes:
        num_tokens: positions before it, whole blocks; 0 is nothing.
        snapshot: the content that names the states; empty where nothing was found.
        blocks: group name -> blocks to share, the first of the sequence.
        sources: group name -> block to copy, the one after those shared.
        num_known_tokens: positions whose rows the target's blocks hold: more than `num_tokens`
            where no snapshot is left at their end.
    """

    num_tokens: int = 0
    snapshot: bytes = b""
    blocks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    sources: Mapping[str, int] = field(default_factory=dict)
    num_known_tokens: int = 0


NO_HIT = PrefixHit()


class PrefixCache:
    """What requests leave behind, over the tables that they hold it in.

    Args:
        block_tables: of the paged groups.
        state_pools: of the recurrent groups.
        groups: of the cache manager.
        snapshots: states at block boundaries.
        device: of the caches.
    """

    def __init__(
        self,
        block_tables: dict[str, BlockTable],
        state_pools: dict[str, StatePool],
        groups: dict[str, CacheGroup],
        snapshots: SnapshotPool,
        device: torch.device,
    ) -> None:
        self.snapshots = snapshots
        self._tables = block_tables
        self._state_pools = state_pools
        self._groups = groups
        self._device = device
        self._target = [name for name in block_tables if not groups[name].spec.reads_next_token]
        self._head = [name for name in block_tables if groups[name].spec.reads_next_token]
        # Which blocks hold the pooled keys of all their positions.
        self._is_pooled: dict[str, npt.NDArray[np.bool_]] = {
            name: np.zeros(table.pool.num_blocks, dtype=np.bool_)
            for name, table in block_tables.items()
            if groups[name].spec.ratio
        }
        self._last_streams: dict[int, Tensor] = {}

    def match(
        self, token_ids: Sequence[int], hashes: Sequence[bytes], *, with_head: bool
    ) -> PrefixHit:
        """The longest beginning of a sequence that a request can do without running.

        Its last token always runs, for the token after it is drawn from that row.

        Args:
            token_ids: the sequence.
            hashes: of its whole blocks.
            with_head: whether the request will draft, so that the head has to know all of it.
        """
        block_size = next(iter(self._tables.values())).block_size
        most = (len(token_ids) - 1) // block_size
        known = 0
        while known < most and self._find(self._target, hashes[known]) is not None:
            known += 1
        found = known
        if with_head and self._head:
            found = 0
            while found < known and self._find(self._head, hashes[found]) is not None:
                found += 1
                next_id = token_ids[found * block_size]
                if self._find(self._head, hashes[found - 1], next_id) is None:
                    break
        while found and hashes[found - 1] not in self.snapshots:
            found -= 1
        if not found:
            return PrefixHit(num_known_tokens=known * block_size)
        blocks = {name: self._chain(name, hashes[:found]) for name in self._target}
        sources = {}
        if with_head:
            ends = [token_ids[(number + 1) * block_size] for number in range(found - 1)]
            blocks |= {name: self._chain(name, hashes[: found - 1], ends) for name in self._head}
            sources = {name: self._chain(name, hashes[found - 1 : found])[0] for name in self._head}
        return PrefixHit(found * block_size, hashes[found - 1], blocks, sources, known * block_size)

    def _find(
        self, names: Sequence[str], content: bytes, next_id: int | None = None
    ) -> list[int] | None:
        """The block of each group, or None where one of them has none."""
        blocks = [self._tables[name].pool.find(content, next_id) for name in names]
        found = [block for block in blocks if block is not None]
        return found if len(found) == len(blocks) else None

    def _chain(
        self, name: str, hashes: Sequence[bytes], next_ids: Sequence[int] | None = None
    ) -> list[int]:
        pool = self._tables[name].pool
        ends = [None] * len(hashes) if next_ids is None else next_ids
        blocks = [pool.find(content, end) for content, end in zip(hashes, ends, strict=True)]
        return [block for block in blocks if block is not None]

    def num_blocks_taken(self, hit: PrefixHit, name: str, num_blocks: int) -> int:
        """Free blocks of a group that a request of `num_blocks` takes which begins with a hit.

        Remembered blocks that nobody holds count as free, until they are held again; the one that
        is copied is held meanwhile.
        """
        shared = hit.blocks.get(name, ())
        held = [*shared, hit.sources[name]] if name in hit.sources else shared
        return num_blocks - len(shared) + self._tables[name].pool.num_idle(held)

    def adopt(self, row: int, hit: PrefixHit) -> None:
        """Gives a row that has no blocks those of a hit; `fill` follows when it has the others."""
        for name, table in self._tables.items():
            table.adopt(row, hit.blocks.get(name, ()))
            if name in hit.sources:
                table.pool.share([hit.sources[name]])

    def fill(self, row: int, hit: PrefixHit) -> None:
        """Copies what a row gets of its own: the head's last block, the states, the last streams.

        Args:
            row: it holds all its blocks, and state slots that are cleared.
            hit: what it has adopted.
        """
        for name, source in hit.sources.items():
            table, number = self._tables[name], len(hit.blocks[name])
            target = table.blocks(row)[number]
            self._groups[name].copy(self._slots(name, [source]), self._slots(name, [target]))
            if name in self._is_pooled:
                self._is_pooled[name][target] = self._is_pooled[name][source]
            table.pool.free([source])
        self.snapshots.restore(hit.snapshot, self._groups, self._state_slots([row]))
        if hit.sources:
            self._last_streams[row] = self.snapshots.last_streams(hit.snapshot)

    def take_last_streams(self, row: int) -> Tensor | None:
        """[W], the streams of the row before a request's first, once; None where none are kept."""
        return self._last_streams.pop(row, None)

    def remember(
        self, row: int, number: int, content: bytes, *, next_id: int | None, with_head: bool
    ) -> None:
        """Lets a block of a row be found.

        Args:
            row: that holds it.
            number: of the block in the sequence; all its rows have run and are kept.
            content: hash of all tokens up to its end.
            next_id: the token after it, None where the request has ended before one.
            with_head: whether the head has run the same rows.
        """
        for name in self._target:
            self._remember(name, row, number, content, PLACEHOLDER_TOKEN_ID)
        if with_head:
            for name in self._head:
                end = PLACEHOLDER_TOKEN_ID if next_id is None else next_id
                self._remember(name, row, number, content, end)

    def _remember(self, name: str, row: int, number: int, content: bytes, next_id: int) -> None:
        table = self._tables[name]
        table.pool.remember(table.blocks(row)[number], content, next_id)

    def note_pooled(self, name: str, row: int, num_pooled: int) -> None:
        """Takes down which blocks of a row hold all their pooled keys.

        Args:
            name: of a group that pools keys.
            row: about to give its blocks back, or to share them.
            num_pooled: pooled keys of its first positions that are formed.
        """
        table = self._tables[name]
        count = num_pooled * self._groups[name].spec.ratio // table.block_size
        self._is_pooled[name][table.blocks(row)[:count]] = True

    def num_pooled(self, name: str, row: int) -> int:
        """Pooled keys of a row's first positions that were formed by others."""
        table = self._tables[name]
        is_pooled = self._is_pooled[name][table.blocks(row)]
        count = len(is_pooled) if is_pooled.all() else int(is_pooled.argmin())
        return count * table.block_size // self._groups[name].spec.ratio

    def note_cleared(self, name: str, blocks: Sequence[int]) -> None:
        """Blocks of a group hold nothing any more."""
        if name in self._is_pooled:
            self._is_pooled[name][list(blocks)] = False

    def save(self, rows: Sequence[int], slots: Sequence[int], counts: Sequence[int]) -> None:
        """Writes snapshots of states as they are after a pass.

        Args:
            rows: n requests.
            slots: n snapshots, reserved.
            counts: of each request, the pending rows that its snapshot has seen.
        """
        self.snapshots.save(self._groups, self._state_slots(rows), slots, counts)

    def forget_all(self) -> None:
        """Lets nothing be found any more; what requests hold stays theirs."""
        self.snapshots.clear()
        for name, table in self._tables.items():
            idle = table.pool.forget_idle(table.pool.num_blocks)
            table.pool.forget(table.pool.remembered)
            if idle:
                self._groups[name].clear(self._slots(name, idle))
                self.note_cleared(name, idle)

    def forget(self, row: int, hashes: Sequence[bytes], *, with_target: bool = True) -> None:
        """Lets the blocks of a row, and the states on its way, not be found any more.

        Args:
            row: what it has run is not to be relied on.
            hashes: of its whole blocks.
            with_target: the target's blocks and the states too, not those of the head alone.
        """
        for name in (*self._target, *self._head) if with_target else self._head:
            table = self._tables[name]
            table.pool.forget(table.blocks(row))
        if with_target:
            for content in hashes:
                self.snapshots.drop(content)

    def release(self, row: int) -> None:
        """A row is given back."""
        self._last_streams.pop(row, None)

    def check_integrity(self) -> None:
        """Nothing is lost among the snapshots, and no block is marked that holds nothing."""
        self.snapshots.check_integrity()
        for name, is_pooled in self._is_pooled.items():
            pool = self._tables[name].pool
            assert not is_pooled[pool.unused].any(), "a block that is free is marked as pooled"

    def _slots(self, name: str, blocks: Sequence[int]) -> Tensor:
        size = self._tables[name].block_size
        first = torch.tensor(blocks, device=self._device)[:, None] * size
        return (first + torch.arange(size, device=self._device)).flatten()

    def _state_slots(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Group name to the state slots [n] of n rows."""
        return {
            name: torch.from_numpy(pool.slots(np.array(rows))).to(self._device)
            for name, pool in self._state_pools.items()
        }
