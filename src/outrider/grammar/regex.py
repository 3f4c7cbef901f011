"""Regular expressions whose every match is one for Python and for JavaScript too.

The library that compiles them reads some things otherwise (a dot takes a line break, a class of all
but some characters takes halves of surrogate pairs), and matches the pattern of a JSON schema with
the text of the JSON, quotes and escapes included. So an expression is written anew, each of its
characters and classes as the set of characters that it stands for, before it is compiled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from outrider.errors import RequestError, shown

_LAST = 0x10FFFF
Ranges = list[tuple[int, int]]
"""Code points, first and last of each range, ascending and apart."""

_SURROGATES: Ranges = [(0xD800, 0xDFFF)]
_LINE_BREAKS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_DIGITS: Ranges = [(0x30, 0x39)]
_WORDS: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_ASCII_SPACES: Ranges = [(0x09, 0x0D), (0x20, 0x20)]
_SPACES: Ranges = [
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_ASCII: Ranges = [(0x00, 0x7F)]
_BY_UTF8_LENGTH: Ranges = [(0x00, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, _LAST)]
# What does not stand for itself in the text of a JSON string, and how it is spelled there.
_NOT_IN_JSON: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
_JSON_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_MAX_REPEATS = 100_000
_MAX_GROUP_DEPTH = 64
_QUANTIFIER = re.compile(r"[*+?]|\{(\d{1,5})(?:,(\d{1,5})?)?\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")


def rewrite_regex(pattern: str, where: str, *, in_json: bool = False, without: str = "") -> str:
    """The expression for the compiler, without anchors.

    Args:
        pattern: `^` and `$` may stand at its ends alone; what no grammar can say is an error.
        where: how an error names it.
        in_json: the text is that of a JSON string without its quotes, rather than plain.
        without: characters that no text may hold.

    Raises:
        RequestError: names the place.
    """
    excluded = [*_SURROGATES, *((ord(char), ord(char)) for char in without)]
    return _Rewriter(pattern, where, in_json, excluded).rewrite()


@dataclass
class _Rewriter:
    """Reads an expression from its beginning."""

    pattern: str
    where: str
    in_json: bool
    excluded: Ranges
    place: int = 0
    num_repeats: int = 1
    depth: int = 0
    written: dict[tuple[tuple[int, int], ...], str] = field(default_factory=dict)

    def rewrite(self) -> str:
        """The whole expression."""
        if self.pattern.startswith("^"):
            self.place = 1
        written = self._alternatives(is_inner=False)
        if self.place < len(self.pattern):
            raise self._error("a parenthesis that nothing opens")
        return f"({written})" if "|" in written else written

    def _alternatives(self, *, is_inner: bool) -> str:
        parts: list[list[str]] = [[]]
        while self.place < len(self.pattern):
            char = self.pattern[self.place]
            if char == ")":
                break
            if char == "|":
                self.place += 1
                parts.append([])
            elif char == "$" and not is_inner and self.place == len(self.pattern) - 1:
                if len(parts) > 1:
                    raise self._error("$ behind alternatives without parentheses around them")
                self.place += 1
            else:
                parts[-1] += [self._atom(), self._quantifier()]
        if len(parts) > 1 and self.pattern.startswith("^") and not is_inner:
            raise self._error("^ before alternatives without parentheses around them")
        return "|".join(map("".join, parts))

    def _atom(self) -> str:
        char = self.pattern[self.place]
        if char == "(":
            match = _GROUP.match(self.pattern, self.place)
            if match is None:
                raise self._error("a group of this kind")
            if self.depth == _MAX_GROUP_DEPTH:
                raise self._error(f"more than {_MAX_GROUP_DEPTH} groups within one another")
            self.place = match.end()
            self.depth += 1
            inner = self._alternatives(is_inner=True)
            self.depth -= 1
            if self.place >= len(self.pattern):
                raise self._error("a parenthesis that nothing closes")
            self.place += 1
            return f"({inner})"
        if char == "[":
            return self._written(self._character_class())
        if char in "*+?{^$":
            raise self._error(f"{char} in this place")
        self.place += 1
        if char == ".":
            return self._written(_without([(0, _LAST)], _LINE_BREAKS))
        if char == "\\":
            return self._written(self._escape())
        return self._written([(ord(char), ord(char))])

    def _quantifier(self) -> str:
        match = _QUANTIFIER.match(self.pattern, self.place)
        if match is None:
            return ""
        least, most = match.groups()
        if most is not None and int(most) < int(least):
            raise self._error("a count whose end comes before its beginning")
        # Counts within counts make a grammar that takes minutes to follow.
        self.num_repeats *= max(int(most or least or 1), 1)
        if self.num_repeats > _MAX_REPEATS:
            raise self._error("counts that make more than 100,000 when multiplied")
        self.place = match.end()
        # As few or as many: the texts are the same.
        if self.pattern.startswith("?", self.place):
            self.place += 1
        return match[0]

    def _escape(self) -> Ranges:
        """What stands after a backslash, which has been taken."""
        if self.place >= len(self.pattern):
            raise self._error("a backslash at the end")
        char = self.pattern[self.place]
        classes = {
            "d": _DIGITS,
            "w": _WORDS,
            "s": _ASCII_SPACES,
            "D": _without(_ASCII, _DIGITS),
            "W": _without(_ASCII, _WORDS),
            "S": _without([(0, _LAST)], _SPACES),
        }
        if char in classes:
            self.place += 1
            return classes[char]
        code = self._escaped_code()
        return [(code, code)]

    def _escaped_code(self) -> int:
        match = _HEX.match(self.pattern, self.place)
        if match is not None:
            self.place = match.end()
            return int(match[1] or match[2], 16)
        char = self.pattern[self.place]
        if char.isalnum() and char not in _CONTROLS:
            raise self._error(f"\\{char}")
        self.place += 1
        return ord(_CONTROLS.get(char, char))

    def _character_class(self) -> Ranges:
        start = self.place
        self.place += 1
        is_negated = self.pattern.startswith("^", self.place)
        self.place += is_negated
        found: Ranges = []
        while not self.pattern.startswith("]", self.place) or not found:
            if self.place >= len(self.pattern):
                self.place = start
                raise self._error("a bracket that nothing closes")
            found += self._class_item(is_negated)
        self.place += 1
        return _without([(0, _LAST)], found) if is_negated else found

    def _class_item(self, is_negated: bool) -> Ranges:
        """A character, a range of them or a class within brackets."""
        first = self._class_escape(is_negated)
        if not isinstance(first, int):
            return first
        ends = self.pattern[self.place : self.place + 2]
        if len(ends) < 2 or ends[0] != "-" or ends[1] == "]":
            return [(first, first)]
        self.place += 1
        last = self._class_escape(is_negated)
        if not isinstance(last, int) or last < first:
            raise self._error("a range whose end comes before its beginning")
        return [(first, last)]

    def _class_escape(self, is_negated: bool) -> int | Ranges:
        char = self.pattern[self.place]
        self.place += 1
        if char in "[" and self.pattern.startswith(("[", ":"), self.place):
            raise self._error("a bracket within brackets")
        if char != "\\":
            return ord(char)
        if self.place >= len(self.pattern):
            raise self._error("a backslash at the end")
        if not is_negated or self.pattern[self.place] not in "dDwWsS":
            found = self._escape()
            return found[0][0] if len(found) == 1 and found[0][0] == found[0][1] else found
        # What is left must be outside the class for everybody: in Python \d has all digits there
        # are, in JavaScript ten.
        kind = self.pattern[self.place]
        self.place += 1
        beyond: Ranges = [(0x80, _LAST)]
        wide = {"s": _SPACES, "d": [*_DIGITS, *beyond], "w": [*_WORDS, *beyond]}
        if kind in wide:
            return wide[kind]
        narrow = {"S": _ASCII_SPACES, "D": _DIGITS, "W": _WORDS}[kind]
        return _without([(0, _LAST)], narrow)

    def _written(self, ranges: Ranges) -> str:
        """A set of characters for the compiler."""
        key = tuple(ranges)
        if key not in self.written:
            self.written[key] = self._write(ranges)
        return self.written[key]

    def _write(self, ranges: Ranges) -> str:
        inside = _without(ranges, self.excluded)
        spelled: list[str] = []
        if self.in_json:
            spelled = [
                rf"\\{_spelled(ord(short))}"
                for char, short in _JSON_ESCAPES.items()
                if any(first <= ord(char) <= last for first, last in inside)
            ]
            inside = _without(inside, _NOT_IN_JSON)
        if inside:
            spelled.insert(0, _class_of(inside))
        if not spelled:
            raise self._error("a class without a character that can stand here")
        return spelled[0] if len(spelled) == 1 else f"({'|'.join(spelled)})"

    def _error(self, what: str) -> RequestError:
        return RequestError(
            f"{self.where} has {what} at character {self.place}, which is not supported, got "
            f"{shown(self.pattern)}"
        )


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters of some ranges that are in none of the others; ascending and apart."""
    left: Ranges = []
    holes = _merged(others)
    start = 0
    for first, last in _merged(ranges):
        # A hole that ends before this range ends before all that follow.
        while start < len(holes) and holes[start][1] < first:
            start += 1
        index = start
        while index < len(holes) and holes[index][0] <= last:
            if first < holes[index][0]:
                left.append((first, holes[index][0] - 1))
            first = holes[index][1] + 1
            index += 1
        if first <= last:
            left.append((first, last))
    return left


def _merged(ranges: Ranges) -> Ranges:
    """The same characters, ascending and apart."""
    merged: Ranges = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _class_of(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _spelled(ranges[0][0])
    # A range across such an edge lets the library pass bytes that are no UTF-8.
    pieces = [
        (max(first, low), min(last, high))
        for first, last in ranges
        for low, high in _BY_UTF8_LENGTH
        if first <= high and last >= low
    ]
    parts = [
        _spelled(first) if first == last else f"{_spelled(first)}-{_spelled(last)}"
        for first, last in pieces
    ]
    return f"[{''.join(parts)}]"


def _spelled(code: int) -> str:
    """One character, within brackets and without."""
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{{{code:x}}}"
