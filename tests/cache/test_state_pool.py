"""State slots of recurrent groups: one a request."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.cache.state_pool import StatePool


def test_slots_of_rows() -> None:
    pool = StatePool(3)
    slots = {row: pool.allocate(row) for row in (2, 0)}
    assert pool.slots(np.array([0, 2, 0])).tolist() == [slots[0], slots[2], slots[0]]
    assert slots[0] != slots[2]
    pool.check_integrity()


def test_misuse_is_refused() -> None:
    pool = StatePool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="row 1 has a slot"):
        pool.allocate(1)
    with pytest.raises(AssertionError, match="row 0 has no slot"):
        pool.free(0)
    with pytest.raises(AssertionError, match="no state slot"):
        pool.slots(np.array([1, 0]))


def test_check_integrity_finds_a_shared_slot() -> None:
    pool = StatePool(2)
    pool.allocate(0)
    pool.allocate(1)
    pool._slots[1] = pool._slots[0]
    with pytest.raises(AssertionError, match="leaked or held twice"):
        pool.check_integrity()


class States(RuleBasedStateMachine):
    """Requests come and go in any order."""

    num_rows = 5

    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(self.num_rows)
        self.held: dict[int, int] = {}

    @rule(row=st.integers(0, num_rows - 1))
    def turn(self, row: int) -> None:
        if row in self.held:
            self.pool.free(row)
            del self.held[row]
        else:
            self.held[row] = self.pool.allocate(row)

    @invariant()
    def every_slot_has_one_place(self) -> None:
        self.pool.check_integrity()
        rows = np.array(sorted(self.held), dtype=np.int64)
        slots = self.pool.slots(rows).tolist()
        assert slots == [self.held[row] for row in rows]
        assert len(set(slots)) == len(slots)


TestStates = States.TestCase
