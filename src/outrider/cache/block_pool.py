"""Hands out the blocks of one paged cache group, and counts who holds each."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from outrider.batch import NULL_BLOCK_ID

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockPool:
    """Block ids with a count of holders each; the null block is never handed out.

    What fails takes nothing and changes no count.

    Args:
        num_blocks: ids 0..num_blocks - 1, the null block among them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [block for block in range(num_blocks - 1, -1, -1) if block != NULL_BLOCK_ID]
        self._num_holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, of one holder each; the caller has made sure that they are there.

        Blocks that were freed together come back in the order they were held in.
        """
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Gives blocks that are held one holder more."""
        self._check_held(blocks)
        for block in blocks:
            self._num_holders[block] += 1

    def free(self, blocks: Sequence[int]) -> list[int]:
        """Takes one holder away from each block.

        Returns:
            Those that nobody holds any more; they can be allocated again.
        """
        self._check_held(blocks)
        for block in blocks:
            self._num_holders[block] -= 1
        released = [block for block in blocks if not self._num_holders[block]]
        self._free.extend(reversed(released))
        return released

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Every block is free, or held by as many as are counted.

        Args:
            held: the blocks of every holder.
        """
        holders = Counter(block for blocks in held for block in blocks)
        counted = {block: count for block, count in enumerate(self._num_holders) if count}
        expected = [block for block in range(self.num_blocks) if block != NULL_BLOCK_ID]
        assert all(len(set(blocks)) == len(blocks) for blocks in held), "a holder has a block twice"
        assert counted == holders, "the holders of a block are miscounted"
        assert sorted([*self._free, *counted]) == expected, "a block is leaked"

    def _check_held(self, blocks: Sequence[int]) -> None:
        is_sound = len(set(blocks)) == len(blocks) and all(
            self._num_holders[block] for block in blocks
        )
        assert is_sound, "a block that is not held, or named twice"
