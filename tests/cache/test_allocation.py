"""Rows, state slots and blocks: given out as requests come and grow, taken back, never in part."""

import pytest

from outrider.batch import RowSpan
from outrider.cache.block_table import BlockTable
from outrider.cache.cache_manager import CacheManager
from outrider.models.qwen4_exp.cache_specs import TARGET_INDEX
from tests.cache.test_cache_manager import BLOCK_SIZE, make_manager, slot_of


def test_room() -> None:
    manager = make_manager(num_blocks=5, max_num_seqs=3)
    assert manager.fits(5 * BLOCK_SIZE)
    assert not manager.fits(5 * BLOCK_SIZE + 1)
    first = manager.allocate(3 * BLOCK_SIZE)
    assert manager.can_allocate(2 * BLOCK_SIZE)
    assert not manager.can_allocate(2 * BLOCK_SIZE + 1)
    assert manager.fits(5 * BLOCK_SIZE), "what would fit alone"
    others = [manager.allocate(1), manager.allocate(1)]
    assert manager.num_free_rows == 0
    assert not manager.can_allocate(1), "no row is left"
    manager.check_integrity()
    for row in (others[1], first, others[0]):
        manager.free(row)
        manager.check_integrity()
    assert manager.can_allocate(5 * BLOCK_SIZE)


def held_blocks(manager: CacheManager) -> list[int]:
    return [table.pool.num_blocks - 1 - table.pool.num_free for table in tables(manager)]


def tables(manager: CacheManager) -> list[BlockTable]:
    return list(manager.block_tables.values())


def test_a_request_grows() -> None:
    """Block by block, in every group at once; what it holds stays where it is."""
    manager = make_manager(num_blocks=6, max_num_seqs=2)
    row = manager.allocate(3)
    for num_tokens in range(3, 49):
        before = [table.blocks(row) for table in tables(manager)]
        assert manager.covers(row, num_tokens) == (num_tokens <= BLOCK_SIZE * len(before[0]))
        manager.extend(row, num_tokens)
        assert manager.covers(row, num_tokens)
        assert set(held_blocks(manager)) == {-(-num_tokens // BLOCK_SIZE)}
        for blocks, table in zip(before, tables(manager), strict=True):
            assert table.blocks(row)[: len(blocks)] == blocks
        manager.check_integrity()
    assert not manager.can_extend(row, 49)
    manager.free(row)
    assert set(held_blocks(manager)) == {0}


def test_what_fails_takes_nothing_in_any_group() -> None:
    manager = make_manager(num_blocks=6, max_num_seqs=3)
    row = manager.allocate(20)
    # One group alone runs short, and not the first.
    manager.block_tables[TARGET_INDEX].pool.allocate(2)
    assert manager.can_extend(row, 32)
    assert not manager.can_extend(row, 33)
    before = held_blocks(manager)
    with pytest.raises(AssertionError, match="no room for 33 tokens"):
        manager.extend(row, 33)
    with pytest.raises(AssertionError, match="no room for 9 tokens"):
        manager.allocate(9)
    with pytest.raises(AssertionError, match="65 tokens are more than a row can have"):
        make_manager(num_blocks=24).allocate(65)
    assert (held_blocks(manager), manager.num_free_rows) == (before, 2)
    assert all(pool.holders == {row} for pool in manager.state_pools.values())


def test_blocks_to_spare() -> None:
    manager = make_manager(num_blocks=5)
    manager.allocate(9)
    assert manager.can_allocate(3 * BLOCK_SIZE)
    assert manager.can_allocate(2 * BLOCK_SIZE, 1)
    assert not manager.can_allocate(2 * BLOCK_SIZE + 1, 1)


def test_a_row_that_nobody_holds() -> None:
    manager = make_manager()
    row = manager.allocate(9)
    manager.free(row)
    for misuse in (
        lambda: manager.free(row),
        lambda: manager.extend(row, 3),
        lambda: manager.commit([RowSpan(row, 0, 1, 0)], [0]),
    ):
        with pytest.raises(AssertionError, match="is nobody's"):
            misuse()
        manager.check_integrity()


def test_check_integrity_finds_what_a_free_row_holds() -> None:
    manager = make_manager()
    row = manager.allocate(9)
    manager._is_held[row] = False
    with pytest.raises(AssertionError, match="a row is leaked"):
        manager.check_integrity()
    manager._free_rows.append(row)
    with pytest.raises(AssertionError, match="a free row holds blocks"):
        manager.check_integrity()
    for table in tables(manager):
        table.free(row)
    with pytest.raises(AssertionError, match="a free row holds a state slot"):
        manager.check_integrity()


def test_a_shared_block_is_cleared_with_its_last_holder() -> None:
    manager = make_manager(max_num_seqs=2)
    first = manager.allocate(20)
    second = manager.allocate(0)
    for table in tables(manager):
        shared = table.blocks(first)[:1]
        table.pool.share(shared)
        table._blocks[second, 0], table._counts[second] = shared[0], 1
    manager.check_integrity()
    for name in manager.block_tables:
        for tensor in manager.groups[name].tensors.values():
            tensor.fill_(1)
    for row, is_kept in ((first, True), (second, False)):
        slots = {name: slot_of(manager, name, second, 0) for name in manager.block_tables}
        manager.free(row)
        for name, slot in slots.items():
            group = manager.groups[name]
            for spec in group.spec.tensors:
                value = group.tensors[spec.name][:, slot // spec.tokens_per_slot]
                assert (value == int(is_kept)).all(), (name, spec.name)
    manager.check_integrity()
