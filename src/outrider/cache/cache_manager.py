"""Owns every kind of state of every request: allocates it, plans windows over it, commits, frees.

All of a request's kinds of state move together: `commit` says once how many drafts were kept, and
each kind draws its own consequence in the next window that `plan` lays out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.batch import IndexRebuild, PagedView, RowSpan, SnapshotRow, Window, WindowSnapshots
from outrider.cache.block_pool import BlockPool
from outrider.cache.block_table import BlockTable
from outrider.cache.groups import CacheGroup, GroupSpec
from outrider.cache.prefix_cache import NO_HIT, PrefixCache, PrefixHit
from outrider.cache.snapshot_pool import SnapshotPool, window_snapshots
from outrider.cache.state_pool import StatePool

if TYPE_CHECKING:
    from collections.abc import Sequence

IntArray = npt.NDArray[np.int64]


class CacheManager:
    """Tables and tensors of all cache groups.

    Args:
        specs: the groups that the model and its head declare.
        block_size: positions of a block in every paged group.
        num_blocks: blocks of each paged group, without the null block.
        max_num_seqs: requests at once.
        max_model_len: positions a request can come to need, drafts included.
        num_pending_rows: P, draft rows a recurrent state keeps.
        dtype: of the tensors.
        device: of the tensors.
        snapshot_specs: what is kept of a request at a block boundary.
        num_snapshots: how many of these; 0 keeps nothing of requests that have ended.

    Attributes:
        prefix: what requests leave to others that begin alike, or None.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        num_pending_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        snapshot_specs: Sequence[GroupSpec] = (),
        num_snapshots: int = 0,
    ) -> None:
        self.block_size = block_size
        self.num_pending_rows = num_pending_rows
        self.device = device
        self.groups: dict[str, CacheGroup] = {}
        self.block_tables: dict[str, BlockTable] = {}
        self.state_pools: dict[str, StatePool] = {}
        max_blocks = -(-max_model_len // block_size)
        for spec in specs:
            if spec.is_paged:
                num_slots = (num_blocks + 1) * block_size
                self.block_tables[spec.name] = BlockTable(
                    max_num_seqs, max_blocks, block_size, BlockPool(num_blocks + 1)
                )
            else:
                num_slots = max_num_seqs
                self.state_pools[spec.name] = StatePool(max_num_seqs)
            self.groups[spec.name] = CacheGroup(spec, num_slots, dtype, device)
        self.prefix: PrefixCache | None = None
        if num_snapshots and self.block_tables:
            snapshots = SnapshotPool(snapshot_specs, num_snapshots, dtype, device)
            self.prefix = PrefixCache(
                self.block_tables, self.state_pools, self.groups, snapshots, device
            )
        self._num_kept = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_pooled = {
            spec.name: np.zeros(max_num_seqs, dtype=np.int64) for spec in specs if spec.ratio
        }
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._is_held = [False] * max_num_seqs

    @property
    def num_free_rows(self) -> int:
        """Requests that could still be added."""
        return len(self._free_rows)

    @property
    def snapshot_groups(self) -> dict[str, CacheGroup]:
        """Where states at block boundaries are kept; empty where none are."""
        return {} if self.prefix is None else self.prefix.snapshots.groups

    def can_allocate(
        self, num_tokens: int, num_spare_blocks: int = 0, hit: PrefixHit = NO_HIT
    ) -> bool:
        """Whether a new request of so many positions finds a row and blocks in every group.

        Args:
            num_tokens: positions.
            num_spare_blocks: blocks that must be left in every group.
            hit: what it begins with.
        """
        blocks = -(-num_tokens // self.block_size)
        return bool(self._free_rows) and all(
            table.pool.num_free >= self._num_taken(name, blocks, hit) + num_spare_blocks
            for name, table in self.block_tables.items()
        )

    def _num_taken(self, name: str, num_blocks: int, hit: PrefixHit) -> int:
        if self.prefix is None:
            return num_blocks
        return self.prefix.num_blocks_taken(hit, name, num_blocks)

    def can_extend(self, row: int, num_tokens: int) -> bool:
        """Whether a request finds the blocks in every group to cover so many positions."""
        return all(table.can_extend(row, num_tokens) for table in self.block_tables.values())

    def covers(self, row: int, num_tokens: int) -> bool:
        """Whether a request has blocks for so many positions in every group."""
        return not any(table.num_missing(row, num_tokens) for table in self.block_tables.values())

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of so many positions could run with the caches to itself."""
        blocks = -(-num_tokens // self.block_size)
        return all(table.pool.num_blocks - 1 >= blocks for table in self.block_tables.values())

    def allocate(self, num_tokens: int, hit: PrefixHit = NO_HIT) -> int:
        """Gives a new request a row, which is returned, a state in each group, and its blocks.

        What fails takes nothing.

        Args:
            num_tokens: positions, those of the hit among them.
            hit: what it begins with; otherwise its states are clear.
        """
        assert self.can_allocate(num_tokens, hit=hit), f"no room for {num_tokens} tokens"
        assert all(num_tokens <= table.max_num_tokens for table in self.block_tables.values()), (
            f"{num_tokens} tokens are more than a row can have"
        )
        row = self._free_rows.pop()
        self._is_held[row] = True
        if self.prefix is not None:
            self.prefix.adopt(row, hit)
        self.extend(row, num_tokens)
        for name, pool in self.state_pools.items():
            slot = pool.allocate(row)
            self.groups[name].clear(torch.tensor([slot], device=self.device))
        self._num_kept[row] = 0
        self.forget_pooled(row)
        if self.prefix is not None and hit.num_tokens:
            self.prefix.fill(row, hit)
            for name, pooled in self._num_pooled.items():
                pooled[row] = self.prefix.num_pooled(name, row)
        return row

    def extend(self, row: int, num_tokens: int) -> None:
        """Lets a request cover so many positions; what fails takes nothing in any group."""
        assert self._is_held[row], f"row {row} is nobody's"
        assert self.can_extend(row, num_tokens), f"no room for {num_tokens} tokens"
        for name, table in self.block_tables.items():
            self._clear(name, table.extend(row, num_tokens))

    def commit(self, spans: Sequence[RowSpan], num_accepted_tokens: Sequence[int]) -> None:
        """Keeps the accepted drafts of a pass and drops the rest, in every kind of state.

        Args:
            spans: what ran.
            num_accepted_tokens: drafts kept of each span, 0..num_drafts.
        """
        for span, num_accepted in zip(spans, num_accepted_tokens, strict=True):
            assert self._is_held[span.row], f"row {span.row} is nobody's"
            assert 0 <= num_accepted <= span.num_drafts, "more drafts accepted than ran"
            self._num_kept[span.row] = num_accepted

    def forget_pooled(self, row: int) -> None:
        """Counts no index keys of a request as pooled: a pass that was to pool them has failed."""
        for pooled in self._num_pooled.values():
            pooled[row] = 0

    def free(self, row: int) -> None:
        """Takes back all that a request holds, and clears the blocks that nobody else holds.

        A block is read under a mask before its next owner has filled it. What an earlier one left
        must be finite for that: 0 * NaN is NaN.
        """
        assert self._is_held[row], f"row {row} is nobody's"
        if self.prefix is not None:
            for name, pooled in self._num_pooled.items():
                self.prefix.note_pooled(name, row, int(pooled[row]))
            self.prefix.release(row)
        for name, table in self.block_tables.items():
            self._clear(name, table.free(row))
        for pool in self.state_pools.values():
            pool.free(row)
        self._is_held[row] = False
        self._free_rows.append(row)

    def _clear(self, name: str, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        first = torch.tensor(blocks, device=self.device)[:, None] * self.block_size
        offsets = torch.arange(self.block_size, device=self.device)
        self.groups[name].clear((first + offsets).flatten())
        if self.prefix is not None:
            self.prefix.note_cleared(name, blocks)

    def num_kept_rows(self, row: int) -> int:
        """Pending rows of a request's last window that were accepted."""
        return int(self._num_kept[row])

    def mark_materialized(self, row: int) -> None:
        """The pending rows of a request have been folded: none is left."""
        self._num_kept[row] = 0

    def num_bytes(self) -> int:
        """Bytes of all groups, and of what is kept of requests that have ended."""
        kept = 0 if self.prefix is None else self.prefix.snapshots.num_bytes
        return kept + sum(group.num_bytes for group in self.groups.values())

    def check_integrity(self) -> None:
        """No block, slot or row is leaked or held twice, and a free row holds nothing."""
        free = [row for row, is_held in enumerate(self._is_held) if not is_held]
        assert sorted(self._free_rows) == free, "a row is leaked or held twice"
        for table in self.block_tables.values():
            assert not any(table.blocks(row) for row in free), "a free row holds blocks"
        for pool in self.state_pools.values():
            assert not pool.holders.intersection(free), "a free row holds a state slot"
        for table in self.block_tables.values():
            table.check_integrity()
        for pool in self.state_pools.values():
            pool.check_integrity()
        if self.prefix is not None:
            self.prefix.check_integrity()

    def plan(
        self,
        spans: Sequence[RowSpan],
        group_names: Sequence[str],
        contexts: Sequence[Sequence[int]],
        *,
        reads_index: bool = True,
        snapshots: Sequence[SnapshotRow] = (),
    ) -> tuple[Tensor, dict[str, Tensor], tuple[Window, ...]]:
        """Lays out the rows of a pass: positions, slots to write, windows.

        Short spans share one window; each longer one, a piece of a prompt, has its own.

        Args:
            spans: in the order of the flattened batch.
            group_names: the groups that this pass touches.
            contexts: per span, the token ids before its first row (empty where no layer of the
                pass reads n-grams).
            reads_index: False where the pass follows an index selection made before.
            snapshots: block boundaries that the pass comes to.

        Returns:
            positions [T], slot_mapping (paged group name -> [T]) and the windows.
        """
        counts = np.array([span.num_rows for span in spans], dtype=np.int64)
        offsets = np.cumsum(counts) - counts
        total = int(counts.sum())
        slot_mapping = {
            name: np.empty(total, dtype=np.int64)
            for name in group_names
            if name in self.block_tables
        }
        positions = np.empty(total, dtype=np.int64)
        windows = []
        for members in self._windows(counts):
            windows.append(
                self._plan_window(
                    members,
                    [spans[i] for i in members],
                    offsets[members],
                    group_names,
                    [contexts[i] for i in members],
                    (positions, slot_mapping),
                    reads_index=reads_index,
                    is_whole=len(members) == len(spans),
                    snapshots=window_snapshots(members, spans, snapshots, self.device),
                )
            )
        device_slots = {name: self._tensor(slots) for name, slots in slot_mapping.items()}
        return self._tensor(positions), device_slots, tuple(windows)

    def _windows(self, counts: IntArray) -> list[list[int]]:
        limit = self.num_pending_rows + 1
        short = [i for i, count in enumerate(counts) if count <= limit]
        alone = [[i] for i, count in enumerate(counts) if count > limit]
        return [short, *alone] if short else alone

    def _plan_window(
        self,
        members: list[int],
        spans: list[RowSpan],
        offsets: IntArray,
        group_names: Sequence[str],
        contexts: list[Sequence[int]],
        flat: tuple[IntArray, dict[str, IntArray]],
        *,
        reads_index: bool,
        is_whole: bool,
        snapshots: WindowSnapshots | None,
    ) -> Window:
        rows, starts, counts, drafts = np.array(
            [(s.row, s.start, s.num_rows, s.num_drafts) for s in spans], dtype=np.int64
        ).T
        length = int(counts.max())
        is_short = length <= self.num_pending_rows + 1
        assert is_short or not drafts.any(), "drafts come in windows that the states can hold back"
        steps = np.arange(length)
        inside = np.minimum(steps, counts[:, None] - 1)
        row_index = offsets[:, None] + inside
        positions = starts[:, None] + inside
        is_row = steps < counts[:, None]
        flat[0][row_index] = positions
        num_keys = int((starts + counts).max())
        paged = {}
        for name in group_names:
            if name not in self.block_tables:
                continue
            slots = self.block_tables[name].slots(rows, num_keys)
            flat[1][name][row_index] = np.take_along_axis(slots, positions, axis=1)
            paged[name] = self._paged_view(
                name, rows, slots, starts, starts + counts, reads_index=reads_index
            )
        kept = self._num_kept[rows]
        return Window(
            request_index=self._tensor(np.array(members, dtype=np.int64)),
            row_index=self._tensor(row_index),
            flat_index=self._tensor(np.flatnonzero(is_row)),
            is_row=self._tensor(is_row),
            num_certain_rows=self._tensor(counts - drafts),
            num_kept_rows=self._tensor(kept),
            positions=self._tensor(positions),
            context_ids=self._tensor(
                np.array(contexts, dtype=np.int64).reshape(len(spans), len(contexts[0]))
            ),
            state_slots={
                name: self._tensor(self.state_pools[name].slots(rows))
                for name in group_names
                if name in self.state_pools
            },
            paged=paged,
            max_seq_len=num_keys,
            is_contiguous=is_whole and bool(is_row.all()),
            has_pending=bool(kept.any()),
            has_drafts=bool(drafts.any()),
            snapshots=snapshots,
        )

    def _paged_view(
        self,
        name: str,
        rows: IntArray,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
        *,
        reads_index: bool,
    ) -> PagedView:
        spec = self.groups[name].spec
        if not spec.ratio:
            return PagedView(self._tensor(slots))
        ratio = spec.ratio
        pooled = np.minimum(self._num_pooled[name][rows], starts // ratio)
        if not reads_index or slots.shape[1] <= spec.dense_limit:
            self._num_pooled[name][rows] = pooled
            return PagedView(self._tensor(slots))
        complete = ends // ratio
        self._num_pooled[name][rows] = complete
        blocks = pooled[:, None] + np.arange(int((complete - pooled).max()))
        is_block = blocks < complete[:, None]
        blocks = np.where(is_block, blocks, 0)
        places = blocks[..., None] * ratio + np.arange(ratio)
        raw = np.take_along_axis(slots, places.reshape(len(rows), -1), axis=1)
        raw = raw.reshape(places.shape)
        num_blocks = slots.shape[1] // ratio
        return PagedView(
            self._tensor(slots),
            self._tensor(slots[:, : num_blocks * ratio : ratio] // ratio),
            IndexRebuild(
                self._tensor(blocks),
                self._tensor(raw),
                self._tensor(np.where(is_block, raw[..., 0] // ratio, 0)),
            ),
        )

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
