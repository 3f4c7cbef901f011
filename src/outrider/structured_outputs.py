"""What the text of an output must be, under vLLM's names, and what keeps a request to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from outrider.errors import RequestError, check_unicode, shown

if TYPE_CHECKING:
    from numpy import int32
    from numpy.typing import NDArray

Reasoning = Literal["open", "optional"]

GRAMMAR_STUCK = "structured_outputs"
"""The stop reason of an output whose grammar led to where nothing may follow."""

# Characters of a grammar in any form, and how deep its objects may lie in one another.
MAX_GRAMMAR_LENGTH = 65_536
_MAX_DEPTH = 32
_MAX_CHOICES = 1024
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text of an output must be: exactly one of the first six is given.

    Such an output ends where its grammar does: the end-of-sequence token is possible where the text
    is complete and nowhere else, and ends it with `ignore_eos` and before `min_tokens` too.

    Attributes:
        json: JSON of this schema, an object or its text; kept as text.
        regex: a text that a regular expression matches as a whole.
        choice: one of these texts.
        grammar: a text of a grammar in EBNF, as in GBNF, whose first rule is called root.
        json_object: true for any JSON object.
        structural_tag: a text that an object of xgrammar's structural tags describes; kept as text.
        disable_any_whitespace: no white space in JSON, instead of up to 10 characters in one place.
        reasoning: the text comes after thoughts, which `</think>` ends and nothing else bounds:
            "open" where the prompt has begun them, "optional" where the model may begin them with
            `<think>`; None where there are none.
    """

    json: str | Mapping[str, object] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, object] | None = None
    disable_any_whitespace: bool = False
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        """Check what can be told without a compiler."""
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                self._set(name, _json_text(f"{_where(name)}", getattr(self, name)))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                check_text(_where(name), getattr(self, name))
        if self.choice is not None:
            self._set("choice", _choices(self.choice))
        if self.json_object not in (None, True):
            raise RequestError(f"{_where('json_object')} must be true, got {self.json_object!r}")
        if type(self.disable_any_whitespace) is not bool:
            raise RequestError(
                f"{_where('disable_any_whitespace')} must be true or false, got "
                f"{shown(self.disable_any_whitespace)}"
            )
        if self.reasoning is not None and self.reasoning not in get_args(Reasoning):
            raise RequestError(
                f"{_where('reasoning')} must be open or optional, got {shown(self.reasoning)}"
            )
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, got "
                f"{' and '.join(given) or 'none'}"
            )
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise RequestError(
                f"{_where('disable_any_whitespace')} is for json and json_object, got {given[0]}"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


class OutputGrammar(Protocol):
    """A grammar, and where in it one output stands."""

    def allowed_after(self, token_ids: Sequence[int], num_certain: int) -> NDArray[int32] | None:
        """What may follow an output.

        Args:
            token_ids: of the output, from its beginning, with drafts at the end.
            num_certain: how many of them were emitted and are never taken back.

        Returns:
            [ceil(V / 32)] whose bit `i % 32` of number `i // 32` says whether id i may follow, or
            None where everything may: after the end, and after a draft that the grammar refuses.
        """
        ...

    def num_allowed(
        self, token_ids: Sequence[int], num_certain: int, draft_ids: Sequence[int]
    ) -> int:
        """How many of these drafts may follow an output, up to the first that may not."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether nothing may follow and the text is not complete, or following takes too long."""
        ...


def check_text(name: str, value: object) -> None:
    """Raises a RequestError where a value is no text, is empty or is too long."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a text of one character or more, got {shown(value)}")
    check_unicode(name, value)
    if len(value) > MAX_GRAMMAR_LENGTH:
        raise RequestError(
            f"{name} has {len(value):,} characters: {MAX_GRAMMAR_LENGTH:,} is the limit"
        )


def check_depth(name: str, value: object, depth: int = _MAX_DEPTH) -> None:
    """Raises a RequestError where lists and objects lie too deep in one another."""
    if not isinstance(value, Mapping | list):
        return
    if not depth:
        raise RequestError(f"{name} is nested too deep: {_MAX_DEPTH} levels are the limit")
    for one in value.values() if isinstance(value, Mapping) else value:
        check_depth(name, one, depth - 1)


def _where(name: str) -> str:
    return f"structured_outputs.{name}"


def _json_text(name: str, value: object) -> str:
    """A JSON object as text, in the order in which its keys were given."""
    if isinstance(value, str):
        check_text(name, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RequestError(f"{name} is no valid JSON, got {shown(value)}") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object, got {shown(value)}")
    check_depth(name, value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name} is no valid JSON: {error}") from None
    check_text(name, text)
    return text


def _choices(values: object) -> tuple[str, ...]:
    name = _where("choice")
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise RequestError(f"{name} must be a list of one text or more, got {shown(values)}")
    if len(values) > _MAX_CHOICES:
        raise RequestError(f"{name} has {len(values):,} entries: {_MAX_CHOICES:,} is the limit")
    for index, value in enumerate(values):
        check_text(f"{name}[{index}]", value)
    if sum(map(len, values)) > MAX_GRAMMAR_LENGTH:
        raise RequestError(f"{name} has more than {MAX_GRAMMAR_LENGTH:,} characters")
    return tuple(dict.fromkeys(values))
