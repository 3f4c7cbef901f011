"""Hands out the blocks of one paged cache group."""

from __future__ import annotations

from outrider.batch import NULL_BLOCK_ID


class BlockPool:
    """Free list of block ids; the null block is never handed out.

    Args:
        num_blocks: ids 0..num_blocks - 1, the null block among them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [block for block in range(num_blocks - 1, -1, -1) if block != NULL_BLOCK_ID]

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks; the caller has made sure that they are there."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        """Gives blocks back."""
        self._free.extend(reversed(blocks))

    def check_integrity(self, held: list[list[int]]) -> None:
        """Every block is free or held by exactly one request.

        Args:
            held: the blocks of every request.
        """
        ids = sorted(self._free + [block for blocks in held for block in blocks])
        expected = [block for block in range(self.num_blocks) if block != NULL_BLOCK_ID]
        assert ids == expected, "a block is leaked or held twice"
