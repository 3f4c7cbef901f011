"""Blocks are handed out once each, and all come back."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.batch import NULL_BLOCK_ID
from outrider.cache.block_pool import BlockPool


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.num_free == 4
    blocks = pool.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    assert NULL_BLOCK_ID not in blocks
    assert pool.num_free == 0
    assert pool.allocate(0) == []
    pool.check_integrity([blocks])


def test_more_than_there_is_cannot_be_had() -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    with pytest.raises(AssertionError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)


def test_what_was_freed_last_is_used_first() -> None:
    """In the order it was held, so that a sequence that comes again lies as before."""
    pool = BlockPool(9)
    held = pool.allocate(3)
    pool.allocate(2)
    pool.free(held)
    assert pool.allocate(3) == held


@pytest.mark.parametrize(
    "held",
    [
        [[1, 2], [3]],  # one is nowhere
        [[1, 2], [3, 4, 4]],  # one is held twice by a request
        [[1, 2, 3], [3, 4]],  # one is held by two
        [[0, 1, 2], [3, 4]],  # the null block is held
    ],
)
def test_check_integrity_finds_what_is_wrong(held: list[list[int]]) -> None:
    pool = BlockPool(5)
    pool.allocate(4)
    with pytest.raises(AssertionError, match="leaked or held twice"):
        pool.check_integrity(held)


def test_check_integrity_finds_a_block_that_is_free_and_held() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="leaked or held twice"):
        pool.check_integrity([blocks])


class Pool(RuleBasedStateMachine):
    """Requests come, grow and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[list[int]] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        self.held.append(self.pool.allocate(count))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.free(self.held.pop(index))

    @invariant()
    def every_block_has_one_place(self) -> None:
        self.pool.check_integrity(self.held)
        blocks = [block for one in self.held for block in one]
        assert len(set(blocks)) == len(blocks)
        assert self.pool.num_free + len(blocks) == 11


TestPool = Pool.TestCase
