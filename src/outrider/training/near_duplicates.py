"""Texts that stand elsewhere too, whole or in large part: measured by the lines they share.

A passage is a few lines in a row, blank lines left out and white space at the ends ignored. Two
copies of a file share most of their passages, also where one was edited; two files that only share
a licence header share few.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Lines in a passage. JSON repeats its own shape, so that fewer lines would say nothing.
_NUM_LINES = {"code": 3, "prose": 2, "json": 6}
# Shorter passages stand everywhere: closing brackets, `return None`.
_MIN_CHARACTERS = 40


def passages(text: str, suite: str) -> set[int]:
    """Returns a hash of each passage of a text; few, or none, if it is short."""
    size = _NUM_LINES[suite]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    joined = ("\n".join(lines[start : start + size]) for start in range(len(lines) - size + 1))
    return {_hash(passage) for passage in joined if len(passage) >= _MIN_CHARACTERS}


def _hash(passage: str) -> int:
    data = passage.encode()
    # Two sums of 32 bits: among millions of passages one alone would collide.
    return zlib.crc32(data) << 32 | zlib.adler32(data)


class PassageIndex:
    """How many texts each passage stands in."""

    def __init__(self) -> None:
        self._num_texts: Counter[int] = Counter()

    def add(self, found: Iterable[int]) -> None:
        """Takes up the passages of one text."""
        self._num_texts.update(found)

    def shared_fraction(self, found: set[int], *, own: int = 0) -> float:
        """Returns which part of a text's passages stands in other texts of the index.

        Args:
            found: the text's passages.
            own: how often the text itself was added.
        """
        if not found:
            return 0.0
        return sum(self._num_texts[passage] > own for passage in found) / len(found)
