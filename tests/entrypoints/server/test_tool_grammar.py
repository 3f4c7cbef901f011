"""Calls drawn at random from their grammar, read by the parser that clients get them from."""

import json
import random
from typing import Any

import jsonschema
import pytest

from outrider.entrypoints.server.chat_protocol import Function
from outrider.entrypoints.server.tool_call_parser import Qwen3CoderToolCallParser
from outrider.entrypoints.server.tool_grammar import call_tag, calls_format, chosen_calls_format
from outrider.errors import RequestError
from outrider.grammar.compiler import GrammarCompiler
from outrider.structured_outputs import StructuredOutputsParams
from tests.entrypoints.server.app_client import bundled_tokenizer
from tests.grammar.random_text import random_text

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "New York"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "options": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}, "name": {"type": "string", "maxLength": 3}},
            "required": ["deep"],
        },
        "unit": {"enum": ["c", None]},
        "ratios": {"type": "array", "items": {"$ref": "#/$defs/ratio"}, "maxItems": 2},
    },
    "required": ["city", "days", "code"],
    "$defs": {"ratio": {"type": "number", "minimum": 0, "maximum": 1}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
SCHEMAS = {"get_weather": WEATHER, "wait": NOTHING}


def parsed(text: str, *, is_held: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    """The content of a text, and its calls."""
    parser = Qwen3CoderToolCallParser(SCHEMAS, is_held=is_held)
    deltas = [parser.feed(text), parser.finish(is_whole=True)]
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.calls:
            name, arguments = calls.setdefault(call.index, ["", ""])
            calls[call.index] = [name + (call.name or ""), arguments + call.arguments]
    content = "".join(delta.content for delta in deltas)
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def tags(*, strict: bool = True) -> list[dict[str, Any]]:
    return [
        call_tag(Function(name=name, parameters=schema, strict=strict), f"tools.{name}")
        for name, schema in SCHEMAS.items()
    ]


@pytest.mark.parametrize("is_one", [False, True])
def test_calls_have_the_arguments_that_their_functions_take(
    compiler: GrammarCompiler, is_one: bool
) -> None:
    params = StructuredOutputsParams(structural_tag=calls_format(tags(), is_one=is_one))
    random_numbers, counts, names = random.Random(5), set(), set()
    for _ in range(25):
        text = random_text(compiler, bundled_tokenizer(), params, random_numbers, 60)
        if text is None:
            continue
        content, calls = parsed(text)
        assert content == ""
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
            names.add(name)
        counts.add(len(calls))
    assert names == set(SCHEMAS)
    assert min(counts) == 1
    assert (max(counts) == 1) == is_one


@pytest.mark.parametrize("beginning", ["", "<tool_call>\n"])
def test_a_chosen_call_is_strict_without_its_tag_too(
    compiler: GrammarCompiler, beginning: str
) -> None:
    form = chosen_calls_format(tags(), is_one=False)
    path = compiler.path(StructuredOutputsParams(structural_tag=form))
    end = "</function>\n</tool_call>\nDone.\n"
    for call, is_right in (
        (f"<function=wait>\n{end}<function=wait>\n{end}", True),
        ("<function=wait> is a function", False),
        (f"<function=fly>\n{end}", False),
        (f"<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n{end}", False),
    ):
        text = f"A <b> text.\n\n{beginning}{call}"
        token_ids = bundled_tokenizer().encode(text, add_special_tokens=False)
        assert (path.num_allowed([], 0, token_ids) == len(token_ids)) == is_right, text


@pytest.mark.parametrize("is_one", [False, True])
def test_what_the_grammar_makes_a_call_is_read_as_one(
    compiler: GrammarCompiler, is_one: bool
) -> None:
    form = chosen_calls_format(tags(), is_one=is_one)
    path = compiler.path(StructuredOutputsParams(structural_tag=form))
    tokenizer = bundled_tokenizer()
    said = "To wait I use <function=wait>"
    begun = tokenizer.encode(said, add_special_tokens=False)
    assert path.num_allowed([], 0, begun) == len(begun)
    # From here on there is no way but through the call, and behind one alone none but the end.
    forced = tokenizer.encode("\n</function>", add_special_tokens=False)
    assert path.num_allowed(begun, len(begun), [*forced, *begun]) == len(forced) + (
        0 if is_one else len(begun)
    )
    prose = tokenizer.encode(" to wait.", add_special_tokens=False)
    assert path.num_allowed(begun, len(begun), prose) == 0
    assert parsed(f"{said}\n</function>", is_held=True) == ("To wait I use ", [("wait", {})])
    # Where nothing holds the text to it, it may speak of a function.
    assert parsed(f"{said} and wait.") == (f"{said} and wait.", [])


def test_a_string_without_bounds_is_any_text_that_ends(compiler: GrammarCompiler) -> None:
    schema = {
        "properties": {"a": {"type": "string"}, "b": {"type": "null"}},
        "required": ["a", "b"],
    }
    tag = call_tag(Function(name="f", parameters=schema, strict=True), "tools[0].function")
    path = compiler.path(StructuredOutputsParams(structural_tag=tag))
    for value, is_right in (
        ("x\n<y>\n", True),
        ("", True),
        ("a</parameter>\nb", True),
        ("<tool_call>", False),
    ):
        call = (
            f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n"
            "<parameter=b>\nnull\n</parameter>\n</function>\n</tool_call>"
        )
        token_ids = bundled_tokenizer().encode(call, add_special_tokens=False)
        assert (path.num_allowed([], 0, token_ids) == len(token_ids)) == is_right, value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"minProperties": 1}, "parameters.minProperties is not supported in a strict function"),
        ({"required": ["a"]}, "parameters.required must name properties"),
        ({"properties": {"a<b": {}}}, "a name that no call can hold"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "properties.a.format is not"),
        (
            {"properties": {"a": {"type": ["string", "integer"]}}},
            "properties.a must be a string or",
        ),
        ({"properties": {"a": {"type": "integer", "multipleOf": 2}}}, "properties.a.multipleOf is"),
        (
            {"properties": {"a": {"enum": ["</parameter>"]}}},
            "properties.a has a value that no call",
        ),
        ({"properties": {"a": 5}}, "properties.a must be a JSON schema, got 5"),
        ({"properties": {"a": {"enum": 5}}}, "properties.a.enum must be a list, got 5"),
        ({"properties": {"a": {"anyOf": 5}}}, "properties.a.anyOf must be a list, got 5"),
        ({"required": [["a"]]}, "parameters.required must name properties"),
        (
            {
                "properties": {f"p{i}": {"$ref": "#/$defs/d"} for i in range(100)},
                "$defs": {"d": {"enum": [f"{i:04}" for i in range(100)]}},
            },
            "the definitions and the 100 properties that refer to them make a grammar of more",
        ),
    ],
)
def test_what_a_strict_function_cannot_have(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call_tag(Function(name="f", parameters=schema, strict=True), "tools[0].function")
    # One that is not strict is called with whatever the model writes.
    loose = call_tag(Function(name="f", parameters=schema), "tools[0].function")
    assert loose["content"]["type"] == "any_text"


def test_definitions_are_as_long_as_they_are_sent() -> None:
    texts = {f"p{i}": {"type": "integer", "description": "\u8bf4\u660e" * 40} for i in range(150)}
    schema = {
        "properties": {"a": {"$ref": "#/$defs/d"}},
        "$defs": {"d": {"type": "object", "properties": texts}},
    }
    tag = call_tag(Function(name="f", parameters=schema, strict=True), "tools[0].function")
    assert len(json.dumps(schema)) > 65_536 > len(json.dumps(tag, ensure_ascii=False))


def test_definitions_go_where_they_are_needed() -> None:
    schema = {
        "properties": {
            **{f"p{i}": {"type": "integer"} for i in range(100)},
            "a": {"$ref": "#/$defs/d"},
        },
        "$defs": {"d": {"enum": list(range(100, 300))}},
    }
    tag = call_tag(Function(name="f", parameters=schema, strict=True), "tools[0].function")
    assert json.dumps(tag).count('"$defs"') == 1
