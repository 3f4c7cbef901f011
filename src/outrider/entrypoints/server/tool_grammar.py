"""Calls of functions as a grammar: what `Qwen3CoderToolCallParser` reads, with values by schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.entrypoints.server.qwen_markup import (
    CALL_END,
    CALL_START,
    FUNCTION_END,
    FUNCTION_START,
    PARAMETER_END,
    PARAMETER_START,
)
from outrider.entrypoints.server.tool_arguments import types_of
from outrider.errors import RequestError, shown
from outrider.grammar.regex import rewrite_regex
from outrider.grammar.structural_tag import json_format, one_of
from outrider.structured_outputs import MAX_GRAMMAR_LENGTH

if TYPE_CHECKING:
    from outrider.entrypoints.server.chat_protocol import Function

_ANNOTATIONS = ("title", "description", "default", "examples")
_DEFINITIONS = ("$defs", "definitions")
# What a value that is text must not hold, or its end would be another.
_TAGS = (PARAMETER_END, PARAMETER_START, FUNCTION_END, CALL_START, CALL_END)


def calls_format(tags: list[dict[str, Any]], *, is_one: bool) -> dict[str, Any]:
    """One call, or one and more."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": is_one,
    }


def chosen_calls_format(tags: list[dict[str, Any]], *, is_one: bool) -> dict[str, Any]:
    """Any text, in which what begins as a call is one, with its `<tool_call>` or without."""
    bare = [
        {**tag, "begin": tag["begin"].removeprefix(f"{CALL_START}\n"), "end": FUNCTION_END}
        for tag in tags
    ]
    return {
        "type": "triggered_tags",
        "triggers": [CALL_START, FUNCTION_START],
        "tags": [*tags, *bare],
        "stop_after_first": is_one,
    }


def call_tag(function: Function, where: str) -> dict[str, Any]:
    """A call of one function.

    A function that is not strict, and whose schema no grammar can hold, gets a call whose arguments
    are of any kind.

    Args:
        function: with the schema of its parameters.
        where: how an error names it.

    Raises:
        RequestError: the function is strict, and what of its schema is not supported.
    """
    content: dict[str, Any]
    try:
        content = _parameters(function.parameters or {}, f"{where}.parameters")
    except RequestError:
        if function.strict:
            raise
        content = {"type": "any_text", "excludes": [CALL_START, CALL_END]}
    return {
        "type": "tag",
        "begin": f"{CALL_START}\n{FUNCTION_START}{function.name}>\n",
        "content": content,
        "end": f"{FUNCTION_END}\n{CALL_END}",
    }


def _parameters(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The parameters in the order of the schema, with those left out that need not be there."""
    known = ("type", "properties", "required", "additionalProperties", "$schema")
    for name in schema:
        if name not in (*known, *_ANNOTATIONS, *_DEFINITIONS):
            raise RequestError(f"{where}.{name} is not supported in a strict function")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_named = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not is_named or not set(required) <= set(properties):
        raise RequestError(f"{where}.required must name properties")
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    # Each property that refers to them brings them along.
    users = {name for name, one in properties.items() if "$ref" in json.dumps(one)}
    if len(users) * len(json.dumps(definitions, ensure_ascii=False)) > MAX_GRAMMAR_LENGTH:
        raise RequestError(
            f"{where}: the definitions and the {len(users)} properties that refer to them make a "
            f"grammar of more than {MAX_GRAMMAR_LENGTH:,} characters"
        )
    elements: list[dict[str, Any]] = []
    for name, one in properties.items():
        if not name or set(name) & set("<>\n"):
            raise RequestError(f"{where}.properties has a name that no call can hold")
        parameter = {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": f"{PARAMETER_START}{name}>\n"},
                *_value(one, definitions if name in users else {}, f"{where}.properties.{name}"),
            ],
        }
        is_needed = name in required
        elements.append(parameter if is_needed else {"type": "optional", "content": parameter})
    if not elements:
        return {"type": "const_string", "value": ""}
    return {"type": "sequence", "elements": elements}


def _value(schema: Any, definitions: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A value with its end: text as it stands, anything else as JSON."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where} must be a JSON schema, got {shown(schema)}")
    end = {"type": "const_string", "value": f"\n{PARAMETER_END}\n"}
    types = types_of(schema, definitions)
    if types and "string" not in types:
        return [json_format({**schema, **definitions}, where), end]
    for name in ("enum", "anyOf"):
        if not isinstance(schema.get(name, []), list):
            raise RequestError(f"{where}.{name} must be a list, got {shown(schema[name])}")
    if types and not {"string", "null"} >= set(types):
        raise RequestError(f"{where} must be a string or have no type string in a strict function")
    said = {name for name in schema if name not in (*_ANNOTATIONS, "type")}
    if said <= {"enum", "const"} and said:
        values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
        texts = ["null" if value is None else str(value) for value in values]
        if any(tag in text for tag in _TAGS for text in texts) or "" in texts:
            raise RequestError(f"{where} has a value that no call can hold")
        return [one_of([{"type": "const_string", "value": text} for text in texts]), end]
    if said == {"pattern"} and types == ("string",):
        pattern = rewrite_regex(str(schema["pattern"]), f"{where}.pattern", without="<\n")
        return [{"type": "regex", "pattern": pattern}, end]
    if said - {"anyOf"} or any(_says_more(one) for one in schema.get("anyOf", ())):
        name = min(said)
        raise RequestError(f"{where}.{name} is not supported in a strict function")
    text = {"type": "any_text", "excludes": [tag for tag in _TAGS if tag != PARAMETER_END]}
    return [{"type": "tag", "begin": "", "content": text, "end": f"\n{PARAMETER_END}\n"}]


def _says_more(schema: Any) -> bool:
    """Whether an alternative asks for more than a type."""
    return not isinstance(schema, Mapping) or bool(set(schema) - {"type", *_ANNOTATIONS})
