"""Hands out the blocks of one paged cache group, counts who holds each, and finds them again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from outrider.batch import NULL_BLOCK_ID, PLACEHOLDER_TOKEN_ID

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockPool:
    """Block ids with a count of holders each; the null block is never handed out.

    A block that is complete can be remembered by what it holds. It stays findable when its last
    holder has gone, and is handed out again only when nothing else is free: the one that nobody
    has held for the longest time first.

    What fails takes nothing and changes no count.

    Args:
        num_blocks: ids 0..num_blocks - 1, the null block among them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [block for block in range(num_blocks - 1, -1, -1) if block != NULL_BLOCK_ID]
        self._num_holders = [0] * num_blocks
        # Remembered blocks: by content and next token, the other way round, and in the order in
        # which their last holders went.
        self._by_content: dict[bytes, dict[int, int]] = {}
        self._contents: dict[int, tuple[bytes, int]] = {}
        self._idle: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, of one holder each; the caller has made sure that they are there.

        Blocks that were freed together come back in the order they were held in. `forget_idle`
        first, where remembered blocks have to be given up for it.
        """
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Gives blocks that are held, or remembered, one holder more."""
        self._check_known(blocks)
        for block in blocks:
            self._idle.pop(block, None)
            self._num_holders[block] += 1

    def free(self, blocks: Sequence[int]) -> list[int]:
        """Takes one holder away from each block.

        Returns:
            Those that nobody holds any more and nobody can find; they can be allocated again.
        """
        self._check_known(blocks)
        assert all(self._num_holders[block] for block in blocks), "a block that is not held"
        for block in blocks:
            self._num_holders[block] -= 1
        left = [block for block in blocks if not self._num_holders[block]]
        released = [block for block in left if block not in self._contents]
        self._free.extend(reversed(released))
        # The end of a sequence is of use only with all that precedes it, and so goes first.
        self._idle |= dict.fromkeys(block for block in reversed(left) if block in self._contents)
        return released

    def remember(self, block: int, content: bytes, next_id: int = PLACEHOLDER_TOKEN_ID) -> None:
        """Lets a held block be found; the first that holds a content is the one that is found.

        Args:
            block: complete, never to be written again.
            content: hash of all tokens up to its end.
            next_id: the token after it, where what the block holds depends on that too.
        """
        assert self._num_holders[block], f"block {block} is not held"
        alike = self._by_content.setdefault(content, {})
        if block not in self._contents and next_id not in alike:
            alike[next_id] = block
            self._contents[block] = content, next_id

    def find(self, content: bytes, next_id: int | None = None) -> int | None:
        """The block with this content, before this token; before any token where None is given."""
        alike = self._by_content.get(content)
        if not alike:
            return None
        return next(reversed(alike.values())) if next_id is None else alike.get(next_id)

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of the blocks are remembered and held by nobody."""
        return sum(block in self._idle for block in blocks)

    def forget_idle(self, num_wanted: int) -> list[int]:
        """Gives up remembered blocks that nobody holds, until so many are free.

        Returns:
            Them: what they hold has to be cleared.
        """
        given_up = []
        while self._idle and len(self._free) < num_wanted:
            given_up.append(next(iter(self._idle)))
            self.forget(given_up[-1:])
        return given_up

    def forget(self, blocks: Sequence[int]) -> None:
        """Lets blocks not be found any more; those that nobody holds can be allocated then."""
        for block in blocks:
            if block not in self._contents:
                continue
            content, next_id = self._contents.pop(block)
            del self._by_content[content][next_id]
            if not self._by_content[content]:
                del self._by_content[content]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    @property
    def unused(self) -> list[int]:
        """Blocks that nobody holds and nobody can find."""
        return list(self._free)

    @property
    def remembered(self) -> list[int]:
        """Blocks that can be found."""
        return list(self._contents)

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Every block is free, remembered, or held by as many as are counted.

        Args:
            held: the blocks of every holder.
        """
        holders = Counter(block for blocks in held for block in blocks)
        counted = {block: count for block, count in enumerate(self._num_holders) if count}
        expected = [block for block in range(self.num_blocks) if block != NULL_BLOCK_ID]
        assert all(len(set(blocks)) == len(blocks) for blocks in held), "a holder has a block twice"
        assert counted == holders, "the holders of a block are miscounted"
        assert sorted([*self._free, *self._idle, *counted]) == expected, "a block is leaked"
        found = {
            block: (content, next_id)
            for content, alike in self._by_content.items()
            for next_id, block in alike.items()
        }
        assert found == self._contents, "a block is remembered by what it does not hold"
        assert self._idle.keys() == self._contents.keys() - counted.keys(), (
            "a remembered block is lost, or a free one remembered"
        )

    def _check_known(self, blocks: Sequence[int]) -> None:
        is_sound = len(set(blocks)) == len(blocks) and all(
            self._num_holders[block] or block in self._idle for block in blocks
        )
        assert is_sound, "a block that is not held, or named twice"
