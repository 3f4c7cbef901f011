"""Hands out state slots of one recurrent cache group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_NO_SLOT = -1


class StatePool:
    """One slot a request; the table maps rows of the batch to slots.

    Args:
        max_num_rows: requests at once, and slots.
    """

    def __init__(self, max_num_rows: int) -> None:
        self._free = list(range(max_num_rows - 1, -1, -1))
        self._slots = np.full(max_num_rows, _NO_SLOT, dtype=np.int64)

    def allocate(self, row: int) -> int:
        """Gives a row a slot."""
        assert self._slots[row] == _NO_SLOT, f"row {row} has a slot"
        slot = self._free.pop()
        self._slots[row] = slot
        return slot

    def free(self, row: int) -> None:
        """Takes a row's slot back."""
        assert self._slots[row] != _NO_SLOT, f"row {row} has no slot"
        self._free.append(int(self._slots[row]))
        self._slots[row] = _NO_SLOT

    def slots(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[b] rows to [b] slots."""
        slots = self._slots[rows]
        assert (slots != _NO_SLOT).all(), "a scheduled request has no state slot"
        return slots

    @property
    def holders(self) -> frozenset[int]:
        """Rows that have a slot."""
        return frozenset(np.flatnonzero(self._slots != _NO_SLOT).tolist())

    def check_integrity(self) -> None:
        """Every slot is free or held by exactly one row."""
        held = self._slots[self._slots != _NO_SLOT].tolist()
        assert sorted(self._free + held) == list(range(len(self._slots))), (
            "a state slot is leaked or held twice"
        )
