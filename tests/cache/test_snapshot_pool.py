"""Snapshots: handed out once each, the oldest given up first, and the very states they are of."""

from typing import Any

import pytest
import torch

from outrider.batch import RowSpan, SnapshotRow
from outrider.cache.snapshot_pool import LAST_STREAMS, SnapshotPool, window_snapshots
from outrider.models.qwen4_exp.cache_specs import snapshot_specs
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from tests.cache.logical_state import largest_difference
from tests.cache.test_rollback import EXACT, model, plain_run, text, window
from tests.models.feeder import Feeder, Piece
from tests.tiny_engine import TINY

CPU = torch.device("cpu")


def make_pool(num_slots: int = 3) -> SnapshotPool:
    specs = snapshot_specs(Qwen4ExpConfig(**TINY), 1)
    return SnapshotPool(specs, num_slots, torch.float64, CPU)


def reserved(pool: SnapshotPool) -> int:
    slot = pool.reserve()
    assert slot is not None
    return slot


def test_the_oldest_is_given_up() -> None:
    pool = make_pool()
    for content in (b"a", b"b", b"c"):
        pool.publish(reserved(pool), content)
    pool.touch(b"a")
    slot = reserved(pool)
    assert [content in pool for content in (b"a", b"b", b"c")] == [True, False, True]
    pool.publish(slot, b"c")
    # There was one like it: its slot is free again, and it counts as used.
    assert (pool.num_published, len(pool._free)) == (2, 1)
    pool.publish(reserved(pool), b"d")
    pool.publish(reserved(pool), b"e")
    assert b"a" not in pool
    pool.check_integrity()


def test_what_is_being_made_is_not_given_up() -> None:
    pool = make_pool()
    slots = [reserved(pool) for _ in range(3)]
    assert pool.reserve() is None
    pool.release(slots[1])
    assert pool.reserve() == slots[1]
    pool.check_integrity()


def test_dropped_and_cleared() -> None:
    pool = make_pool()
    pool.publish(reserved(pool), b"a")
    pool.drop(b"b")
    pool.drop(b"a")
    pool.publish(reserved(pool), b"c")
    being_made = reserved(pool)
    pool.clear()
    assert (pool.num_published, sorted(pool._free)) == (0, sorted({0, 1, 2} - {being_made}))
    pool.check_integrity()


@pytest.mark.parametrize(
    "harm",
    [
        lambda pool: pool._free.pop(),
        lambda pool: pool._reserved.clear(),
        lambda pool: pool._published.update({b"b": 0}),
        lambda pool: pool._published.clear(),
    ],
)
def test_check_integrity_finds_what_is_wrong(harm: Any) -> None:
    pool = make_pool()
    pool.publish(reserved(pool), b"a")
    reserved(pool)
    pool.check_integrity()
    harm(pool)
    with pytest.raises(AssertionError, match="leaked or kept twice"):
        pool.check_integrity()


def state_of(pool: SnapshotPool, slot: int) -> dict[str, torch.Tensor]:
    """As `logical_state` tells it."""
    return {
        f"{name}.{tensor_name}": tensor[:, slot]
        for name, group in pool.groups.items()
        if name != LAST_STREAMS
        for tensor_name, tensor in group.tensors.items()
        if tensor.numel()
    }


def expected_state(num_tokens: int) -> dict[str, torch.Tensor]:
    """The recurrent states after so many tokens, fed one by one."""
    state = plain_run()[0][num_tokens]
    return {name: x for name, x in state.items() if name.startswith(("delta_net", "ngram"))}


@pytest.mark.parametrize("j", range(4))
def test_a_snapshot_among_the_drafts_is_the_state_of_plain_decoding(j: int) -> None:
    """The law of rollback for snapshots: verify K, keep K, and the state after j of them."""
    feeder = Feeder(model(), [text()], num_pending_rows=3)
    feeder.run([Piece(0, 20)])
    feeder.run([window(feeder, 0, 3, 3)])
    pool = make_pool()
    slot = reserved(pool)
    row = feeder.requests[0].row
    manager = feeder.manager
    slots = {name: torch.tensor([p._slots[row]]) for name, p in manager.state_pools.items()}
    pool.save(manager.groups, slots, [slot], [j])
    for other in range(4):
        differences = largest_difference(state_of(pool, slot), expected_state(21 + other))
        assert (max(differences.values()) < EXACT) == (other == j), (other, differences)
    # And the other way: a request that is given it.
    pool.publish(slot, b"a")
    for name, state_slots in slots.items():
        manager.groups[name].clear(state_slots)
    pool.restore(b"a", manager.groups, slots)
    pool.save(manager.groups, slots, [reserved(pool)], [0])
    differences = largest_difference(state_of(pool, 1), expected_state(21 + j))
    assert max(differences.values()) < EXACT


@pytest.mark.parametrize("length", [2, 4, 40])
def test_where_the_layers_make_snapshots(length: int) -> None:
    """Those before the last certain row, whatever else runs beside."""
    rows = [RowSpan(0, 5, 4, 3), RowSpan(1, 0, length, 0)]
    wanted = [SnapshotRow(0, 1, 9), SnapshotRow(0, 3, 8)]
    wanted += [SnapshotRow(1, n, n) for n in range(1, length + 1)]
    found = window_snapshots([1], rows, wanted, CPU)
    assert found is not None
    assert found.stops == tuple((0, n) for n in range(1, length))
    assert found.slots.tolist() == found.num_rows.tolist() == list(range(1, length))
    assert window_snapshots([0], rows, wanted, CPU) is None, "they come to be known later"
