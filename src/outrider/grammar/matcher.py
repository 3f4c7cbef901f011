"""A grammar that follows the tokens of one text: all that the engine needs of a library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from numpy import int32
    from numpy.typing import NDArray


class Matcher(Protocol):
    """Where in a grammar a text stands."""

    def accept(self, token_id: int) -> bool:
        """Takes up one more token; False, and no change, where the grammar has no place for it."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens that were accepted."""
        ...

    def bitmask(self) -> NDArray[int32] | None:
        """Which ids may follow, as `OutputGrammar.allowed_after` says; None is all of them."""
        ...

    def is_terminated(self) -> bool:
        """Whether the text has ended with an end-of-sequence token."""
        ...
