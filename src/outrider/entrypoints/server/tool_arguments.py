"""Values that a model wrote as text, as the JSON that a tool's schema asks for."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from math import isinf
from typing import Any

# Schemas of one value that are looked at: alternatives, and what references lead to.
_MAX_SCHEMAS = 256
# Of a value that may be Python's notation; past that it is a text.
_MAX_LITERAL_LENGTH = 1 << 16
_MAX_LITERAL_DEPTH = 64
# Words of schemas that were made from the types of a programming language.
_TYPE_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
}


def types_of(schema: object, root: object) -> tuple[str, ...]:
    """JSON types that a schema allows, in its order; none where it does not say.

    Args:
        schema: of a value.
        root: what its references are looked up in.
    """
    found: list[str] = []
    left = [schema]
    for _ in range(_MAX_SCHEMAS):
        if not left:
            break
        one = left.pop(0)
        if isinstance(one, Mapping):
            types, inner = _types_and_inner(one)
            found += types
            left = [
                _referred(part, root) if isinstance(part, str) else part for part in inner
            ] + left
    return tuple(dict.fromkeys(found))


def _types_and_inner(schema: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """Types that a schema names itself, or else the schemas and references that it leaves it to."""
    kind = schema.get("type")
    named = [kind] if isinstance(kind, str) else _listed(kind)
    if named:
        return [_TYPE_NAMES.get(str(one).lower(), str(one).lower()) for one in named], []
    inner = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    for key in ("anyOf", "oneOf", "allOf"):
        inner += [one for one in _listed(schema.get(key)) if isinstance(one, Mapping)]
    if inner:
        return [], inner
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if values:
        return list(map(_type_of, values)), []
    return ["object"] * ("properties" in schema) + ["array"] * ("items" in schema), []


def is_text(types: Sequence[str]) -> bool:
    """Whether a value of these types is a text, whatever it says."""
    return not types or (types[0] == "string" and "null" not in types)


def to_json(value: str, types: Sequence[str]) -> str:
    """A value as JSON: of the first type that it can be read as, or else the text as it stands.

    Args:
        value: as the model wrote it.
        types: those that the schema allows.
    """
    if is_text(types):
        return text_json(value)
    word = value.strip()
    if word.lower() in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    for kind in types:
        if kind == "string":
            return text_json(value)
        found = None if kind == "null" else _as_type(word, kind)
        if found is not None:
            return found
    # Of none of the types: what it is, if that is JSON, for whoever checks it.
    return word if _parsed(word) is not None else text_json(value)


def text_json(text: str) -> str:
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def _as_type(word: str, kind: str) -> str | None:
    """A value of one type as JSON, in the model's own spelling where that is JSON."""
    if kind == "boolean":
        return word.lower() if word.lower() in ("true", "false") else None
    spelled, value = word, _parsed(word)
    if value is None and kind in ("object", "array"):
        spelled, value = _of_python(word)
    if isinstance(value, float) and kind == "integer":
        # JSON schema takes 5.0 for an integer.
        return str(int(value)) if value.is_integer() else None
    is_right = value is not None
    if kind in _PYTHON_TYPES:
        is_right = isinstance(value, _PYTHON_TYPES[kind]) and not isinstance(value, bool)
    return spelled if is_right else None


def _parsed(word: str) -> Any:
    """The value that JSON spells so; None where it is no JSON, or null."""
    try:
        return json.loads(word, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _finite(word: str) -> float:
    value = float(word)
    if isinf(value):
        raise ValueError(f"{word} is larger than a number can be")
    return value


def _of_python(word: str) -> tuple[str, Any]:
    """What Python's notation of a list or a dict says, as JSON and as a value.

    Older templates of Qwen write arguments into the prompt so, and models copy that.
    """
    depth = most = 0
    for char in word[: _MAX_LITERAL_LENGTH + 1]:
        depth += (char in "[{(") - (char in "]})")
        most = max(most, depth)
    if len(word) > _MAX_LITERAL_LENGTH or most > _MAX_LITERAL_DEPTH:
        return word, None
    try:
        with warnings.catch_warnings(action="ignore"):
            spelled = json.dumps(ast.literal_eval(word), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return word, None
    return spelled, _parsed(spelled)


def _referred(reference: str, root: object) -> object:
    """What a reference within the schema points to; one to elsewhere is never followed."""
    if not reference.startswith("#"):
        return None
    for part in reference.lstrip("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    return next((kind for kind, types in _PYTHON_TYPES.items() if isinstance(value, types)), "null")
