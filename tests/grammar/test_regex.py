"""Expressions are written anew in time that grows with their length."""

import random
import time

import pytest

from outrider.errors import RequestError
from outrider.grammar.regex import Ranges, _without, rewrite_regex


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("a" * 60_000, 60_000),
        ("." * 20_000, None),
        ("[^" + "".join(chr(0x4E00 + 2 * i) for i in range(20_000)) + "]", None),
        ("(" * 64 + "a" + ")" * 64, 129),
    ],
)
def test_long_expressions(pattern: str, length: int | None) -> None:
    start = time.perf_counter()
    written = rewrite_regex(pattern, "p", in_json=True)
    assert time.perf_counter() - start < 5
    assert length in (None, len(written))


def test_groups_within_groups_have_a_limit() -> None:
    with pytest.raises(RequestError, match="p has more than 64 groups within one another"):
        rewrite_regex("(" * 2_000 + "a" + ")" * 2_000, "p")
    # Side by side they are as many as one likes.
    assert rewrite_regex("(a)" * 2_000, "p") == "(a)" * 2_000


def test_ranges_without_others() -> None:
    """Against sets of characters, which know nothing of ranges."""
    generator = random.Random(0)

    def some() -> Ranges:
        starts = [generator.randrange(40) for _ in range(generator.randrange(7))]
        return [(start, start + generator.randrange(6)) for start in starts]

    def spelled(ranges: Ranges) -> list[int]:
        return [code for first, last in ranges for code in range(first, last + 1)]

    for _ in range(2_000):
        ranges, others = some(), some()
        left = _without(ranges, others)
        assert spelled(left) == sorted(set(spelled(ranges)) - set(spelled(others)))
        # Two ranges that touch are one.
        assert all(left[i][1] + 1 < left[i + 1][0] for i in range(len(left) - 1))
