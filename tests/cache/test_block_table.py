"""Which slot a position lies in: no two positions share one."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.batch import NULL_BLOCK_ID
from outrider.cache.block_pool import BlockPool
from outrider.cache.block_table import BlockTable


def make_table(num_blocks: int = 20, block_size: int = 4, num_rows: int = 3) -> BlockTable:
    return BlockTable(num_rows, 8, block_size, BlockPool(num_blocks))


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (32, 8)]
)
def test_blocks_that_cover_a_sequence(num_tokens: int, num_blocks: int) -> None:
    table = make_table()
    assert table.num_missing(1, num_tokens) == num_blocks
    table.extend(1, num_tokens)
    assert len(table.blocks(1)) == num_blocks
    assert table.num_missing(1, num_tokens) == 0
    assert table.blocks(0) == table.blocks(2) == []


def test_growing_keeps_what_there_is() -> None:
    table = make_table()
    table.extend(0, 3)
    table.extend(1, 5)
    first = table.blocks(0)
    table.extend(0, 4)
    assert table.blocks(0) == first
    table.extend(0, 9)
    assert table.blocks(0)[:1] == first
    assert len(table.blocks(0)) == 3
    # Nothing is taken back where fewer positions are asked for.
    table.extend(0, 2)
    assert len(table.blocks(0)) == 3


def test_what_fails_takes_nothing() -> None:
    """Neither where blocks are missing nor where a row would come to be too long."""
    table = make_table(num_blocks=7)
    table.extend(0, 9)
    for row, num_tokens in ((1, 13), (0, 25), (0, 33)):
        assert not table.can_extend(row, num_tokens)
        with pytest.raises(AssertionError, match=f"no blocks for {num_tokens} tokens"):
            table.extend(row, num_tokens)
        table.check_integrity()
    assert (len(table.blocks(0)), len(table.blocks(1)), table.pool.num_free) == (3, 0, 3)
    table.extend(0, 24)
    wide = make_table(num_blocks=20)
    wide.extend(0, 32)
    assert not wide.can_extend(0, 33)
    assert wide.pool.num_free > 0


def test_a_block_that_two_rows_hold() -> None:
    """It comes free with the last of them, and only that row's `free` names it."""
    table = make_table()
    table.extend(0, 9)
    shared, own = table.blocks(0)[:2], table.blocks(0)[2:]
    table.pool.share(shared)
    table._blocks[1, :2] = shared
    table._counts[1] = 2
    table.check_integrity()
    assert table.free(0) == own
    table.check_integrity()
    assert table.blocks(1) == shared
    assert table.free(1) == shared
    assert table.pool.num_free == 19


def test_slots() -> None:
    table = make_table()
    table.extend(2, 6)
    table.extend(0, 9)
    slots = table.slots(np.array([0, 2]), 9)
    assert slots.shape == (2, 9)
    for row, of_row in zip((0, 2), slots.tolist(), strict=True):
        blocks = table.blocks(row)
        for position in range(4 * len(blocks)):
            if position < 9:
                assert of_row[position] == blocks[position // 4] * 4 + position % 4
    # Past its end a request reads the null block.
    assert [slot // 4 for slot in slots[1, 8:].tolist()] == [NULL_BLOCK_ID]


def test_freeing_forgets_a_row() -> None:
    table = make_table()
    table.extend(0, 9)
    table.extend(1, 2)
    kept = table.blocks(1)
    table.free(0)
    assert table.blocks(0) == []
    assert table.blocks(1) == kept
    assert (table.slots(np.array([0]), 8) // 4 == NULL_BLOCK_ID).all()
    table.check_integrity()


def test_check_integrity_finds_a_shared_block() -> None:
    table = make_table()
    table.extend(0, 4)
    table.extend(1, 4)
    table.check_integrity()
    table._blocks[1, 0] = table._blocks[0, 0]
    with pytest.raises(AssertionError, match="miscounted"):
        table.check_integrity()


class Table(RuleBasedStateMachine):
    """Rows grow and go in any order; two tables stand for two groups of one batch."""

    num_rows = 4
    block_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table(num_blocks=14, num_rows=self.num_rows)
        self.lengths = [0] * self.num_rows

    @rule(row=st.integers(0, num_rows - 1), more=st.integers(1, 9))
    def extend(self, row: int, more: int) -> None:
        length = min(self.lengths[row] + more, 32)
        if self.table.num_missing(row, length) <= self.table.pool.num_free:
            self.table.extend(row, length)
            self.lengths[row] = length

    @precondition(lambda self: any(self.lengths))
    @rule(row=st.integers(0, num_rows - 1))
    def free(self, row: int) -> None:
        self.table.free(row)
        self.lengths[row] = 0

    @invariant()
    def no_two_positions_share_a_slot(self) -> None:
        self.table.check_integrity()
        slots = self.table.slots(np.arange(self.num_rows), 32).tolist()
        used = [slot for row, length in enumerate(self.lengths) for slot in slots[row][:length]]
        assert len(set(used)) == len(used)
        assert all(slot // self.block_size != NULL_BLOCK_ID for slot in used)

    def teardown(self) -> None:
        for row in range(self.num_rows):
            self.table.free(row)
        assert self.table.pool.num_free == 13


TestTable = Table.TestCase
