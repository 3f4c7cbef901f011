"""Blocks are handed out once each, and all come back."""

from typing import Any

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


def test_a_remembered_block_is_found_until_it_is_needed() -> None:
    pool = BlockPool(6)
    held = pool.allocate(3)
    for block, content in zip(held, (b"a", b"b", b"c"), strict=True):
        pool.remember(block, content)
    assert pool.free(held) == [], "nothing of it is to be cleared"
    assert (pool.num_free, pool.num_idle(held), pool.unused) == (5, 3, [5, 4])
    assert [pool.find(content) for content in (b"a", b"b", b"c", b"d")] == [*held, None]
    pool.share([held[0]])
    assert (pool.num_free, pool.num_idle(held)) == (4, 2)
    assert pool.forget_idle(2) == [], "others are free"
    # The end of a sequence goes before its beginning.
    assert pool.forget_idle(3) == [held[2]]
    assert pool.find(b"c") is None
    assert sorted(pool.allocate(3)) == sorted([held[2], 4, 5])
    pool.check_integrity([[held[0]], [held[2], 4, 5]])


def test_those_held_last_stay_longest() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    for block in held:
        pool.remember(block, bytes([block]))
    for block in (held[1], held[0], held[2]):
        pool.free([block])
    pool.share([held[1]])
    pool.free([held[1]])
    assert pool.forget_idle(3) == [held[0], held[2], held[1]]


def test_blocks_before_different_tokens() -> None:
    pool = BlockPool(6)
    first, second, third = held = pool.allocate(3)
    pool.remember(first, b"a", 7)
    pool.remember(second, b"a", 9)
    pool.remember(third, b"a", 9)
    assert (pool.find(b"a", 7), pool.find(b"a", 9), pool.find(b"a", 8)) == (first, second, None)
    assert pool.find(b"a") == second
    assert pool.free(held) == [third], "of two alike the second is forgotten"
    pool.forget([second])
    assert pool.find(b"a") == first
    pool.forget([first, first, third])
    assert (pool.find(b"a"), pool.remembered, pool.num_free) == (None, [], 5)
    pool.check_integrity([])


def test_only_what_is_held_can_be_remembered() -> None:
    with pytest.raises(AssertionError, match="block 1 is not held"):
        BlockPool(3).remember(1, b"a")


@pytest.mark.parametrize(
    "harm",
    [
        lambda pool: pool._by_content.clear(),
        lambda pool: pool._contents.pop(1),
        lambda pool: pool._by_content[b"a"].update({-1: 2}),
        lambda pool: pool._idle.clear(),
        lambda pool: pool._free.append(pool._idle.popitem()[0]),
        lambda pool: pool._idle.update({3: None}),
    ],
)
def test_check_integrity_finds_what_is_wrong_among_the_remembered(harm: Any) -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    pool.remember(1, b"a")
    pool.remember(2, b"b")
    pool.free([1])
    pool.check_integrity([held[1:]])
    harm(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity([held[1:]])


class Pool(RuleBasedStateMachine):
    """Requests come, share what others hold, and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[list[int]] = []
        self.contents = 0

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        given_up = self.pool.forget_idle(count)
        self.held.append(self.pool.allocate(count))
        assert set(given_up) <= set(self.held[-1])

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for one in self.held for block in one]))
        self.contents += 1
        self.pool.remember(block, bytes([self.contents % 7]), self.contents % 2)

    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        found = self.pool.find(bytes([data.draw(st.integers(0, 6))]))
        if found is not None:
            self.held.append([found])
            self.pool.share([found])

    @precondition(lambda self: self.pool.remembered)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.pool.forget([data.draw(st.sampled_from(self.pool.remembered))])

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
        kept = others | set(self.pool.remembered)
        assert self.pool.free(blocks) == [block for block in blocks if block not in kept]

    @invariant()
    def every_block_is_free_or_counted(self) -> None:
        self.pool.check_integrity(self.held)
        blocks = {block for one in self.held for block in one}
        assert self.pool.num_free + len(blocks) == 11


TestPool = Pool.TestCase
