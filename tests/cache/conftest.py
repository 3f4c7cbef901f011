"""Memory that was not written is NaN in every test of this folder."""

from tests.poisoned_memory import poisoned_empty

__all__ = ["poisoned_empty"]
