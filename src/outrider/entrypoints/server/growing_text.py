"""Text that comes in pieces, read from its front by parsers that must not care where it was cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# White space between two tags, at most; Qwen's templates write one line break.
MAX_SPACE = 64
# Of a function or a parameter.
MAX_NAME_LENGTH = 128

_SPACE = " \t\r\n"


class NeedMoreError(Exception):
    """What comes next decides, and it has not come yet."""


class GrowingText:
    """What a parser has not used yet.

    Every look ahead answers for good or raises `NeedMoreError`, so that a parser which takes text
    only after an answer does the same whatever the pieces were. Looks are bounded: what is held
    back stays short.

    Attributes:
        rest: the text.
        num_taken: characters that were taken.
        is_ended: nothing more will come, and no look raises.
    """

    def __init__(self) -> None:
        self.rest = ""
        self.num_taken = 0
        self.is_ended = False

    def read(self, piece: str, step: Callable[[], None]) -> None:
        """Adds a piece, and repeats a step while there is text and what it does is certain.

        Args:
            piece: what comes next.
            step: takes from the text, or raises `NeedMoreError`.
        """
        self.rest += piece
        try:
            while self.rest:
                step()
        except NeedMoreError:
            pass

    def take(self, count: int) -> str:
        """Removes characters from the front, and returns them."""
        taken, self.rest = self.rest[:count], self.rest[count:]
        self.num_taken += len(taken)
        return taken

    def take_until_tag(self) -> str:
        """Takes what stands in front of the next "<", or all where there is none."""
        place = self.rest.find("<")
        return self.take(len(self.rest) if place < 0 else place)

    def starts_with(self, tag: str, at: int = 0, or_is_cut: bool = False) -> bool:
        """Whether a tag stands here.

        Args:
            tag: text.
            at: characters from the front.
            or_is_cut: at the end of the text, the beginning of the tag counts as the tag.
        """
        if self.rest.startswith(tag, at):
            return True
        if not tag.startswith(self.rest[at:]):
            return False
        if not self.is_ended:
            raise NeedMoreError
        return or_is_cut

    def after_space(self, at: int) -> int:
        """Where the first character stands that is no white space, which may be the end.

        Past `MAX_SPACE` characters of white space it is the next one, whatever that is.
        """
        last = at + MAX_SPACE
        while at < min(len(self.rest), last) and self.rest[at] in _SPACE:
            at += 1
        if at == len(self.rest) and at < last and not self.is_ended:
            raise NeedMoreError
        return at

    def name(self, at: int) -> str | None:
        """What stands before the next ">"; None where that is no name."""
        place = at
        while place < len(self.rest) and place - at <= MAX_NAME_LENGTH:
            char = self.rest[place]
            if char == ">":
                return self.rest[at:place] or None
            if char in "<\n":
                return None
            place += 1
        if place - at <= MAX_NAME_LENGTH and not self.is_ended:
            raise NeedMoreError
        return None
