"""Which schemas are taken is settled in time that grows with their text, and never by a crash."""

import time
from typing import Any

import pytest

from outrider.errors import RequestError
from outrider.grammar.json_schema import check_json_schema

OVERLAP = r"could be of \[0\] and \[1\] at once"
LEADS_NOWHERE = r"\$ref leads to no schema"


def branches(depth: int) -> dict[str, Any]:
    """Two alternatives that differ `depth` levels down, with two ways to each level."""
    parts: dict[str, Any] = {}
    for side, kind in (("a", "string"), ("b", "null")):
        parts[f"{side}{depth}"] = {"type": kind}
        for level in range(depth):
            inner = {"$ref": f"#/$defs/{side}{level + 1}"}
            parts[f"{side}{level}"] = {
                "type": "object",
                "properties": {"x": inner, "y": inner},
                "required": ["x", "y"],
            }
    return {"$defs": parts, "oneOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}]}


def tagged(number: int, num_shared: int = 0) -> list[dict[str, Any]]:
    """Alternatives that a constant tells from one another, behind what they share."""
    shared = {f"a{i}": {"type": "string"} for i in range(num_shared)}
    return [
        {
            "type": "object",
            "properties": {**shared, "kind": {"const": f"k{i}"}},
            "required": [*shared, "kind"],
        }
        for i in range(number)
    ]


@pytest.mark.parametrize(
    "schema",
    [
        branches(5),
        {"oneOf": [{"const": i} for i in range(5_000)]},
        {"oneOf": [{"enum": list(range(9_000))}, {"enum": list(range(9_000, 18_000))}]},
        {"oneOf": [{"const": True}, {"const": 1}, {"const": [1]}, {"const": {"a": [1]}}]},
        {"oneOf": tagged(140)},
        {"oneOf": tagged(140, num_shared=6)},
        {"oneOf": [{"type": "null"}, {"type": ["string", "boolean"]}, {"type": "object"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {
            "type": "object",
            "properties": {"default": {"type": "null"}, "a": {"$ref": "#/properties/default"}},
        },
        {"type": "array", "items": {"type": "null"}, "$defs": {"a": {"$ref": "#/items"}}},
    ],
)
def test_what_is_taken(schema: dict[str, Any]) -> None:
    start = time.perf_counter()
    check_json_schema(schema, "s")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        # More levels than are looked into, by 2 ** 40 ways.
        (branches(40), OVERLAP),
        ({"oneOf": tagged(300)}, "oneOf has too many alternatives to compare"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, OVERLAP),
        ({"oneOf": [{"const": {"a": [1], "b": 2}}, {"enum": [0, {"b": 2, "a": [1]}]}]}, OVERLAP),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, OVERLAP),
        ({"oneOf": [{"const": 2}, {}]}, OVERLAP),
        (
            {
                "$defs": {
                    name: {
                        "type": "object",
                        "properties": {"x": {"$ref": f"#/$defs/{name}"}},
                        "required": ["x"],
                    }
                    for name in "ab"
                },
                "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            },
            OVERLAP,
        ),
        ({"$ref": "#/default", "default": {"required": 5}}, LEADS_NOWHERE),
        (
            {"oneOf": [{"$ref": "#/default"}, {"type": "null"}], "default": {"required": 5}},
            LEADS_NOWHERE,
        ),
        ({"$ref": "#/$defs", "$defs": {"a": {"type": "null"}}}, LEADS_NOWHERE),
        ({"$ref": "#/$defs/a/const", "$defs": {"a": {"const": {}}}}, LEADS_NOWHERE),
        ({"type": ["string", "string"]}, "s.type must be of"),
    ],
)
def test_what_is_refused(schema: dict[str, Any], message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError, match=message):
        check_json_schema(schema, "s")
    assert time.perf_counter() - start < 5


def test_alternatives_wait_for_what_they_refer_to() -> None:
    """They are compared when each part is known to be a schema, whatever comes first."""
    inner = {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}
    schema = {
        "$defs": {"a": {"type": "object", "properties": {"x": inner}, "required": 5}},
        "$ref": "#/$defs/a",
    }
    with pytest.raises(RequestError, match=r"s\.\$defs\.a\.required must be a list"):
        check_json_schema(schema, "s")
