"""Uninitialised memory that cannot be mistaken for data."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

INTEGER_POISON = -(1 << 40)


def poison(tensor: Tensor) -> Tensor:
    """Fills with NaN, or with an id that is out of every range."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(INTEGER_POISON) if tensor.dtype == torch.int64 else tensor


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was allocated and not written holds NaN, so that reading it cannot go unseen.

    Imported into the `conftest.py` of a folder, it holds for the tests of that folder.
    """
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args: Any, _original: Any = original, **options: Any) -> Tensor:
            with torch.no_grad():
                return poison(_original(*args, **options))

        monkeypatch.setattr(owner, name, poisoned)
    numpy_empty = np.empty

    def poisoned_array(*args: Any, **options: Any) -> Any:
        array = numpy_empty(*args, **options)
        if array.dtype == np.int64:
            array.fill(INTEGER_POISON)
        return array

    monkeypatch.setattr(np, "empty", poisoned_array)
