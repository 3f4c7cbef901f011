"""Which slots the positions of each request lie in, for one cache group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.batch import NULL_BLOCK_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.cache.block_pool import BlockPool


class BlockTable:
    """Blocks of every row of the batch; a row is a request's place in the engine's tables.

    Args:
        max_num_rows: requests at once.
        max_num_blocks: blocks a request can come to hold.
        block_size: positions a block.
        pool: where blocks come from.
    """

    def __init__(
        self, max_num_rows: int, max_num_blocks: int, block_size: int, pool: BlockPool
    ) -> None:
        self.block_size = block_size
        self.pool = pool
        self._blocks = np.full((max_num_rows, max_num_blocks), NULL_BLOCK_ID, dtype=np.int64)
        self._counts = [0] * max_num_rows

    @property
    def max_num_tokens(self) -> int:
        """Positions that a row can come to cover."""
        return self._blocks.shape[1] * self.block_size

    def num_missing(self, row: int, num_tokens: int) -> int:
        """Blocks that must be added to a row before it covers `num_tokens` positions."""
        return max(-(-num_tokens // self.block_size) - self._counts[row], 0)

    def can_extend(self, row: int, num_tokens: int) -> bool:
        """Whether a row can come to cover `num_tokens` positions: by its length, and by blocks."""
        missing = self.num_missing(row, num_tokens)
        is_short = self._counts[row] + missing <= self._blocks.shape[1]
        return is_short and missing <= self.pool.num_free

    def extend(self, row: int, num_tokens: int) -> list[int]:
        """Lets a row cover `num_tokens` positions; what fails takes nothing.

        Returns:
            Those of its new blocks that hold what was remembered of others, to be cleared.
        """
        assert self.can_extend(row, num_tokens), f"no blocks for {num_tokens} tokens"
        missing = self.num_missing(row, num_tokens)
        if not missing:
            return []
        given_up = self.pool.forget_idle(missing)
        self._append(row, self.pool.allocate(missing))
        return given_up

    def adopt(self, row: int, blocks: Sequence[int]) -> None:
        """Lets a row that has no blocks share those of others, as its first ones."""
        assert not self._counts[row], f"row {row} has blocks"
        self.pool.share(blocks)
        self._append(row, blocks)

    def blocks(self, row: int) -> list[int]:
        """Block ids of a row, in the order of their positions."""
        return self._blocks[row, : self._counts[row]].tolist()

    def free(self, row: int) -> list[int]:
        """Gives a row's blocks back; returns those that nobody holds and nobody can find."""
        released = self.pool.free(self.blocks(row))
        self._blocks[row] = NULL_BLOCK_ID
        self._counts[row] = 0
        return released

    def slots(self, rows: npt.NDArray[np.int64], num_positions: int) -> npt.NDArray[np.int64]:
        """[b] rows to the slots [b, num_positions] of positions 0.. (null block past the end)."""
        count = -(-num_positions // self.block_size)
        blocks = self._blocks[rows, :count]
        slots = blocks[:, :, None] * self.block_size + np.arange(self.block_size)
        return slots.reshape(len(rows), -1)[:, :num_positions]

    def check_integrity(self) -> None:
        """No block is lost, and no row holds one that is not counted for it."""
        self.pool.check_integrity([self.blocks(row) for row in range(len(self._counts))])

    def _append(self, row: int, blocks: Sequence[int]) -> None:
        count = self._counts[row]
        self._blocks[row, count : count + len(blocks)] = blocks
        self._counts[row] = count + len(blocks)
