"""Every kind of structured output as one: a structural tag of xgrammar."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError
from outrider.grammar.json_schema import check_json_schema
from outrider.grammar.json_strings import rewrite_strings
from outrider.grammar.regex import rewrite_regex

if TYPE_CHECKING:
    from outrider.structured_outputs import StructuredOutputsParams

MAX_WHITESPACE = 10
"""Characters of white space in one place of JSON: a model that writes nothing else comes to an end
of it, and two levels of four spaces fit."""

COMPACT_JSON = "compact_json_schema"
"""A kind of format that the library has no word for: JSON without white space."""

_THINK_START, _THINK_END = "<think>", "</think>"
# Between the thoughts and the text; the templates of Qwen write two.
_GAP = {"type": "regex", "pattern": "\n{0,2}"}


def structural_tag(params: StructuredOutputsParams) -> dict[str, Any]:
    """What is asked for as a structural tag.

    Raises:
        RequestError: a JSON schema asks for what no grammar here holds a text to.
    """
    return {
        "type": "structural_tag",
        "format": _after_thoughts(text_format(params), params.reasoning),
    }


def text_format(params: StructuredOutputsParams) -> dict[str, Any]:
    """What is asked for, without thoughts.

    Raises:
        RequestError: as `structural_tag`.
    """
    if params.structural_tag is not None:
        given: dict[str, Any] = json.loads(str(params.structural_tag))
        return given.get("format", given)
    if params.regex is not None:
        pattern = rewrite_regex(params.regex, "structured_outputs.regex")
        if not pattern:
            raise RequestError("structured_outputs.regex matches no text but the empty one")
        return {"type": "regex", "pattern": pattern}
    if params.choice is not None:
        return one_of([{"type": "const_string", "value": choice} for choice in params.choice])
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
    form = json_format(schema, "structured_outputs.json")
    return {**form, "type": COMPACT_JSON} if params.disable_any_whitespace else form


def json_format(schema: Any, where: str) -> dict[str, Any]:
    """JSON of a schema.

    Args:
        schema: as JSON.
        where: how an error names it.

    Raises:
        RequestError: it asks for what no grammar here holds a text to.
    """
    check_json_schema(schema, where)
    return {
        "type": "json_schema",
        "json_schema": rewrite_strings(schema, where),
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


def one_of(formats: list[dict[str, Any]]) -> dict[str, Any]:
    """Any of some formats."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _after_thoughts(form: dict[str, Any], reasoning: str | None) -> dict[str, Any]:
    """A format with thoughts in front of it."""
    if reasoning is None:
        return form
    is_open = reasoning == "open"
    thoughts: dict[str, Any] = {
        "type": "sequence",
        "elements": [
            {
                "type": "tag",
                "begin": "" if is_open else _THINK_START,
                # A call of a function would end the thoughts.
                "content": {"type": "any_text", "excludes": ["<tool_call>"]},
                "end": _THINK_END,
            },
            _GAP,
        ],
    }
    if not is_open:
        thoughts = {"type": "optional", "content": thoughts}
    return {"type": "sequence", "elements": [thoughts, form]}
