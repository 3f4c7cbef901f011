"""Which files of a package are text worth learning, and which are junk.

A model of this size learns by heart what repeats, and nothing from tables of numbers, so both are
left out: what a program wrote, what was packed for transport, what is one long table.
"""

from __future__ import annotations

import ast
import json
import re
import warnings

MIN_BYTES = 400
MAX_BYTES = {"code": 150_000, "prose": 150_000, "json": 100_000}
_MAX_LINE = {"code": 300, "prose": 1_500, "json": 3_000}  # characters
_MAX_MEAN_LINE = {"code": 80, "prose": 400, "json": 200}
# Bytes outside ASCII, in parts of all bytes: other languages than the corpus has.
_MAX_FOREIGN_SHARE = 0.02
# Digits in parts of all characters that are not white space.
_MAX_DIGIT_SHARE = {"code": 0.12, "prose": 0.12, "json": 0.15}
# Lines that hold one element of a literal and nothing else, in parts of all lines.
_MAX_TABLE_SHARE = 0.5
_TABLE_LINE = re.compile(r"""^\s*[\[({]*\s*(?:["'-]|\d|[)\]}])[^=]*[,\])}]$""")
_GENERATED = re.compile(
    r"do not edit|(?:auto-?|automatically )generated|generated (?:by|from|file|automatically)",
    re.IGNORECASE,
)
# What stands for bytes that are no UTF-8, and bytes of no text.
_BROKEN = re.compile("[\ufffd\0]")
_NO_DIGITS = dict.fromkeys(map(ord, "0123456789"))
_HEAD = 1_200  # characters in which a generated file says that it is one


def objection(text: str, suite: str) -> str | None:
    """Returns why a text is not taken, in a word or two, or None if it is."""
    size = len(text.encode())
    if not MIN_BYTES <= size <= MAX_BYTES[suite]:
        return "size"
    if size - len(text.encode("ascii", "ignore")) > _MAX_FOREIGN_SHARE * size or _BROKEN.search(
        text
    ):
        return "not English"
    lines = text.splitlines()
    if max(map(len, lines)) > _MAX_LINE[suite] or len(text) / len(lines) > _MAX_MEAN_LINE[suite]:
        return "long lines"
    if _GENERATED.search(text[:_HEAD]):
        return "generated"
    num_solid = sum(map(len, text.split()))
    if num_solid - sum(map(len, text.translate(_NO_DIGITS).split())) > (
        _MAX_DIGIT_SHARE[suite] * num_solid
    ):
        return "numbers"
    if suite == "code":
        if sum(map(bool, map(_TABLE_LINE.match, lines))) > _MAX_TABLE_SHARE * len(lines):
            return "table"
        return "no Python" if parse_python(text) is None else None
    if suite == "json" and not _is_json(text):
        return "no JSON"
    return None


def parse_python(text: str) -> ast.Module | None:
    """Returns the tree of a text, or None where it is no Python of the running version."""
    try:
        with warnings.catch_warnings():
            # Of the other project's string escapes.
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False
