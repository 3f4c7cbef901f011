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


def test_a_block_comes_back_with_its_last_holder() -> None:
    pool = BlockPool(9)
    held = pool.allocate(4)
    pool.share(held[:2])
    pool.share(held[:1])
    pool.check_integrity([held, held[:2], held[:1]])
    assert pool.free(held) == held[2:]
    assert pool.num_free == 6
    assert pool.free(held[:1]) == []
    assert pool.free(held[:2]) == held[:2]
    assert pool.num_free == 8
    pool.check_integrity([])


@pytest.mark.parametrize("blocks", [[1, 5], [1, 1], [0], [1, 0]])
@pytest.mark.parametrize("verb", ["share", "free"])
def test_only_what_is_held_can_be_shared_or_freed(verb: str, blocks: list[int]) -> None:
    """And where it cannot, no count has changed."""
    pool = BlockPool(6)
    held = pool.allocate(3)
    assert held == [1, 2, 3]
    with pytest.raises(AssertionError, match="not held, or named twice"):
        getattr(pool, verb)(blocks)
    pool.check_integrity([held])
    pool.free(held)
    with pytest.raises(AssertionError, match="not held"):
        pool.free(held[:1])
    pool.check_integrity([])


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[1, 2], [3]], "miscounted"),  # one is nowhere
        ([[1, 2], [3, 4, 4]], "a holder has a block twice"),
        ([[1, 2, 3], [3, 4]], "miscounted"),  # one is held by two and counted for one
        ([[0, 1, 2], [3, 4]], "miscounted"),  # the null block is held
    ],
)
def test_check_integrity_finds_what_is_wrong(held: list[list[int]], message: str) -> None:
    pool = BlockPool(5)
    pool.allocate(4)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(held)


def test_check_integrity_finds_a_holder_that_is_gone() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    pool.share(blocks[:1])
    pool.check_integrity([blocks, blocks[:1]])
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_integrity([blocks])


def test_check_integrity_finds_a_block_that_is_free_and_held() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_integrity([blocks])


@pytest.mark.parametrize("wrong", [[4], [1, 2, 3, 4, 4]])
def test_check_integrity_finds_a_free_list_that_is_wrong(wrong: list[int]) -> None:
    pool = BlockPool(5)
    pool._free[:] = wrong
    with pytest.raises(AssertionError, match="leaked"):
        pool.check_integrity([])


class Pool(RuleBasedStateMachine):
    """Requests come, share what others hold, and go in any order."""

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
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.held.append(blocks[: data.draw(st.integers(0, len(blocks)))])
        self.pool.share(self.held[-1])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        others = {block for one in self.held for block in one}
        assert self.pool.free(blocks) == [block for block in blocks if block not in others]

    @invariant()
    def every_block_is_free_or_counted(self) -> None:
        self.pool.check_integrity(self.held)
        blocks = {block for one in self.held for block in one}
        assert self.pool.num_free + len(blocks) == 11


TestPool = Pool.TestCase
