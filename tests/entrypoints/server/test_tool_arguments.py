"""What a model wrote as text becomes the JSON that a schema asks for, or stays text."""

import json
from typing import Any

import pytest

from outrider.entrypoints.server.tool_arguments import is_text, to_json, types_of

NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ROOT = {
    "$defs": {
        "Point": {"type": "object", "properties": {"x": {"type": "number"}}},
        "a/b": {"type": "integer"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 100},
    }
}
TYPES: list[tuple[Any, tuple[str, ...]]] = [
    ({"type": "string"}, ("string",)),
    ({"type": ["integer", "null"]}, ("integer", "null")),
    ({"type": "Float"}, ("number",)),
    ({"type": "float"}, ("number",)),
    (NULLABLE, ("string", "null")),
    ({"oneOf": [{"type": "array"}, {"type": "string"}]}, ("array", "string")),
    ({"enum": ["a", "b"]}, ("string",)),
    ({"enum": [1, None, True, 2.5]}, ("integer", "null", "boolean", "number")),
    ({"const": 5}, ("integer",)),
    ({"$ref": "#/$defs/Point"}, ("object",)),
    ({"$ref": "#/$defs/a~1b"}, ("integer",)),
    ({"$ref": "#/$defs/Loop"}, ()),
    ({"$ref": "https://example.org/schema"}, ()),
    ({"$ref": "#/nowhere"}, ()),
    ({"properties": {}}, ("object",)),
    ({"items": {}}, ("array",)),
    ({}, ()),
    (True, ()),
    (None, ()),
    ({"type": 5, "anyOf": "x", "enum": {}}, ()),
]


@pytest.mark.parametrize(("schema", "types"), TYPES, ids=str)
def test_types_of_a_schema(schema: Any, types: tuple[str, ...]) -> None:
    assert types_of(schema, ROOT) == types


VALUES: list[tuple[str, str, Any]] = [
    # types, as it was written, and what it is
    ("", "5", "5"),
    ("string", "null", "null"),
    ("string", " 5 ", " 5 "),
    ("string null", "None", None),
    ("string null", "none of it", "none of it"),
    ("integer", "5", 5),
    ("integer", " 5\n", 5),
    ("integer", "5.0", 5),
    ("integer", "5.5", 5.5),
    ("integer", "five", "five"),
    ("integer", "true", True),
    ("integer", "9" * 5000, "9" * 5000),
    ("integer", "9" * 30, int("9" * 30)),
    ("integer", "None", None),
    ("number", "1e2", 100.0),
    ("number", "1e400", "1e400"),
    ("number", "NaN", "NaN"),
    ("number", "-Infinity", "-Infinity"),
    ("number", "01", "01"),
    ("boolean", "True", True),
    ("boolean", "false", False),
    ("boolean", "yes", "yes"),
    ("array", "[1, 2]", [1, 2]),
    ("array", "['a', None, True]", ["a", None, True]),
    ("array", "(1, 2)", [1, 2]),
    ("array", "{1, 2}", "{1, 2}"),
    ("array", "[" * 500, "[" * 500),
    ("array", "[1", "[1"),
    ("object", '{"a": {"b": 1.50}}', {"a": {"b": 1.5}}),
    ("object", "{'a': 'it\\'s'}", {"a": "it's"}),
    ("object", "{1: 1+2j}", "{1: 1+2j}"),
    ("object", "[1]", [1]),
    ("object", '{"a": NaN}', '{"a": NaN}'),
    ("object", "", ""),
    ("array string", "[1]", [1]),
    ("array string", "[1", "[1"),
    ("string array", "[1]", "[1]"),
    ("integer string", "x", "x"),
    ("integer null", "null", None),
    ("any", "5", 5),
    ("any", "x", "x"),
]


@pytest.mark.parametrize(("types", "value", "meant"), VALUES, ids=lambda one: str(one)[:20])
def test_values(types: str, value: str, meant: Any) -> None:
    found = json.loads(to_json(value, types.split()))
    assert (found, type(found)) == (meant, type(meant))


def test_numbers_keep_the_models_own_spelling() -> None:
    assert to_json("1.50", ["number"]) == "1.50"
    assert to_json("100000000000000000001", ["number"]) == "100000000000000000001"


def test_what_is_a_text_whatever_it_says() -> None:
    assert is_text(())
    assert is_text(("string", "integer"))
    assert not is_text(("string", "null"))
    assert not is_text(("integer", "string"))
