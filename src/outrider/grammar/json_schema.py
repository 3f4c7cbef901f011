"""Which JSON schemas a grammar holds a text to: what it would pass over is an error that names it.

The library turns a schema into a grammar and leaves out what it has no rule for. An output must
validate, so a schema is taken only if each of its keywords has an effect, or never has any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import RequestError, shown

_ANNOTATIONS = frozenset(
    [
        "$comment",
        "$id",
        "$schema",
        "default",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    ]
)
_DEFINITIONS = ("$defs", "definitions")
# Keywords whose value is schemas by their names.
_NAMED = (*_DEFINITIONS, "properties")
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "boolean": (),
    "null": (),
}
_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
# Keywords that say all there is to say beside annotations.
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_LARGEST_COUNT = 10_000
# Of alternatives with one another, and how far into their properties: some hundredths of a second.
_MAX_COMPARISONS = 10_000
_MAX_COMPARED_DEPTH = 8


def check_json_schema(schema: object, where: str) -> None:
    """Refuses a schema that a text can break in spite of its grammar.

    Args:
        schema: as JSON.
        where: how an error names it.

    Raises:
        RequestError: names the keyword.
    """
    _SchemaCheck(schema).check(schema, where)


class _SchemaCheck:
    """One look at every part of a schema.

    Args:
        root: what references are looked up in.
    """

    def __init__(self, root: object) -> None:
        self._root = root
        self._alternatives: list[tuple[list[Any], str]] = []
        self._num_comparisons = 0
        self._disjoint: dict[tuple[int, int, int], bool] = {}
        self._constants: dict[int, frozenset[Any] | None] = {}

    def check(self, schema: object, where: str) -> None:
        """Refuses what is wrong in a schema or in its parts."""
        self._check_part(schema, where)
        # They look into other parts, each of which is known to be right by now.
        for one_of, place in self._alternatives:
            self._check_alternatives(one_of, place)

    def _check_part(self, schema: object, where: str) -> None:
        if schema is True:
            return
        if not isinstance(schema, Mapping):
            raise RequestError(f"{where} must be a JSON schema, got {shown(schema)}")
        self._check_keywords(schema, where)
        for name in _DEFINITIONS:
            for key, part in _entries(schema, name, where):
                self._check_part(part, f"{where}.{name}.{key}")
        for name in ("anyOf", "oneOf", "allOf"):
            for index, part in enumerate(_listed(schema, name, where)):
                self._check_part(part, f"{where}.{name}[{index}]")
        if len(schema.get("allOf", ())) > 1:
            raise RequestError(f"{where}.allOf is supported with one schema, got more")
        self._alternatives.append((schema.get("oneOf", []), f"{where}.oneOf"))
        if "$ref" in schema:
            self._resolve(schema["$ref"], f"{where}.$ref")
        self._check_object(schema, where)
        self._check_array(schema, where)
        _check_values(schema, where)

    def _check_keywords(self, schema: Mapping[str, Any], where: str) -> None:
        whole = [name for name in _WHOLE if name in schema]
        types = _types(schema, where)
        known = {"type", *_DEFINITIONS, *_ANNOTATIONS, *whole[:1]}
        if not whole:
            known.update(name for kind in types for name in _KEYWORDS[kind])
        for name, value in schema.items():
            if name in known or (name == "uniqueItems" and value is False):
                continue
            every = {one for names in _KEYWORDS.values() for one in names}
            if name in every and not whole:
                raise RequestError(
                    f"{where}.{name} needs a type that it is for, got type "
                    f"{shown(schema.get('type'))}"
                )
            beside = f" beside {whole[0]}" if name in every or name in _WHOLE else ""
            raise RequestError(f"{where}.{name} is not supported{beside}")
        if whole and whole[0] not in ("enum", "const") and "type" in schema:
            raise RequestError(f"{where}.type is not supported beside {whole[0]}")

    def _check_alternatives(self, one_of: Sequence[Any], where: str) -> None:
        """Refuses two alternatives that a value could be of at once."""
        parts = [self._followed(part) for part in one_of]
        values = [None if part is None else self._constants_of(part) for part in parts]
        # Most often all are constants, and there may be many.
        indices: dict[Any, int] = {}
        for index, constants in enumerate(values):
            for value in constants or ():
                if indices.setdefault(value, index) != index:
                    raise _overlap(where, indices[value], index)
        others = [index for index, constants in enumerate(values) if constants is None]
        for i in others:
            for j in range(len(parts)):
                is_new = i < j or values[j] is not None
                if is_new and not self._are_disjoint(parts[i], parts[j], where):
                    raise _overlap(where, *sorted((i, j)))

    def _are_disjoint(
        self,
        one: Mapping[str, Any] | None,
        other: Mapping[str, Any] | None,
        where: str,
        depth: int = _MAX_COMPARED_DEPTH,
    ) -> bool:
        """Whether it is plain that no value is of both schemas."""
        if one is None or other is None or not depth:
            return False
        pair = (id(one), id(other), depth)
        if pair not in self._disjoint:
            self._num_comparisons += 1
            if self._num_comparisons > _MAX_COMPARISONS:
                raise RequestError(f"{where} has too many alternatives to compare; use anyOf")
            self._disjoint[pair] = self._compare(one, other, where, depth)
        return self._disjoint[pair]

    def _compare(
        self, one: Mapping[str, Any], other: Mapping[str, Any], where: str, depth: int
    ) -> bool:
        types = [_types_of_all(schema) for schema in (one, other)]
        if all(types) and types[0].isdisjoint(types[1]):
            return True
        values = [self._constants_of(schema) for schema in (one, other)]
        if values[0] is not None and values[1] is not None:
            return values[0].isdisjoint(values[1])
        if not one.get("type") == other.get("type") == "object":
            return False
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        properties = [schema.get("properties", {}) for schema in (one, other)]
        pairs = [
            (self._followed(properties[0].get(name)), self._followed(properties[1].get(name)))
            for name in sorted(shared)
        ]
        # Most often a constant tells them apart, and costs nothing to look at.
        for pair in pairs:
            keys = [None if part is None else self._constants_of(part) for part in pair]
            if keys[0] is not None and keys[1] is not None and keys[0].isdisjoint(keys[1]):
                return True
        return any(self._are_disjoint(a, b, where, depth - 1) for a, b in pairs)

    def _constants_of(self, schema: Mapping[str, Any]) -> frozenset[Any] | None:
        """Keys of the only values of a schema, where it lists them."""
        if id(schema) not in self._constants:
            listed = [schema["const"]] if "const" in schema else schema.get("enum")
            keys = None if listed is None else frozenset(map(_key, listed))
            self._constants[id(schema)] = keys
        return self._constants[id(schema)]

    def _followed(self, schema: object) -> Mapping[str, Any] | None:
        """What a chain of references ends at."""
        for _ in range(16):
            if not isinstance(schema, Mapping):
                return None
            if "$ref" not in schema:
                return schema
            schema = self._resolve(schema["$ref"], "$ref")
        return None

    def _resolve(self, reference: object, where: str) -> object:
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            raise RequestError(f"{where} must begin with #, got {shown(reference)}")
        found, is_named = self._root, False
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            # Only to schemas, which a default or a constant is not.
            is_known = is_named or name in (*_NAMED, "items", "additionalProperties")
            if not isinstance(found, Mapping) or name not in found or not is_known:
                raise RequestError(f"{where} leads to no schema, got {shown(reference)}")
            found, is_named = found[name], not is_named and name in _NAMED
        if is_named:
            raise RequestError(f"{where} leads to no schema, got {shown(reference)}")
        return found

    def _check_object(self, schema: Mapping[str, Any], where: str) -> None:
        properties = dict(_entries(schema, "properties", where))
        for name, part in properties.items():
            self._check_part(part, f"{where}.properties.{name}")
        for index, name in enumerate(_listed(schema, "required", where, is_empty_ok=True)):
            if not isinstance(name, str) or name not in properties:
                raise RequestError(
                    f"{where}.required[{index}] must name one of the properties, got {shown(name)}"
                )
        additional = schema.get("additionalProperties", False)
        if type(additional) is bool:
            return
        self._check_part(additional, f"{where}.additionalProperties")

    def _check_array(self, schema: Mapping[str, Any], where: str) -> None:
        for index, part in enumerate(_listed(schema, "prefixItems", where)):
            self._check_part(part, f"{where}.prefixItems[{index}]")
        items = schema.get("items", True)
        if items is not False:
            self._check_part(items, f"{where}.items")


def _check_values(schema: Mapping[str, Any], where: str) -> None:
    """Refuses numbers, texts and lists of values that say nothing that can be held."""
    for name in _COUNTS:
        count = schema.get(name, 0)
        if type(count) is not int or not 0 <= count <= _LARGEST_COUNT:
            raise RequestError(
                f"{where}.{name} must be an integer from 0 to {_LARGEST_COUNT}, got {shown(count)}"
            )
    for name in _KEYWORDS["number"]:
        bound = schema.get(name, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not _is_finite(bound):
            raise RequestError(f"{where}.{name} must be a number, got {shown(bound)}")
    if "pattern" in schema and not isinstance(schema["pattern"], str):
        raise RequestError(f"{where}.pattern must be a text, got {shown(schema['pattern'])}")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise RequestError(
            f"{where}.format must be one of {', '.join(_FORMATS)}, got {shown(schema['format'])}"
        )
    if (
        sum(name in schema for name in ("pattern", "format"))
        + ("minLength" in schema or "maxLength" in schema)
        > 1
    ):
        raise RequestError(f"{where}: of pattern, format and a length only one is supported")
    values = _listed(schema, "enum", where)
    types = _types(schema, where) if "type" in schema else ()
    for index, value in enumerate([*values, *([schema["const"]] if "const" in schema else [])]):
        if types and not any(_is_of(value, kind) for kind in types):
            name = f"enum[{index}]" if index < len(values) else "const"
            raise RequestError(f"{where}.{name} is not of the type {shown(schema['type'])}")


def _types(schema: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The types that a schema names, in their order."""
    if "type" not in schema:
        return ()
    kinds = schema["type"]
    listed = [kinds] if isinstance(kinds, str) else kinds
    if (
        not isinstance(listed, Sequence)
        or not listed
        or not all(isinstance(kind, str) and kind in _KEYWORDS for kind in listed)
        or len(set(listed)) < len(listed)
    ):
        raise RequestError(
            f"{where}.type must be of {', '.join(_KEYWORDS)}, or a list of them, got {shown(kinds)}"
        )
    return tuple(listed)


def _types_of_all(schema: Mapping[str, Any]) -> set[str]:
    """The types that a value of a schema can have; none where that is not plain."""
    found = set(_types(schema, "type"))
    # An integer is a number.
    return found | {"integer"} if "number" in found else found


def _key(value: Any) -> Any:
    """The same for two values that are the same JSON, in which true is not 1 and 1 is 1.0."""
    if isinstance(value, bool):
        return (bool, value)
    if isinstance(value, list):
        return (list, tuple(map(_key, value)))
    if isinstance(value, Mapping):
        return (dict, frozenset((name, _key(one)) for name, one in value.items()))
    return value


def _overlap(where: str, i: int, j: int) -> RequestError:
    return RequestError(
        f"{where}: a value could be of [{i}] and [{j}] at once; give them other types, or a "
        "required property with a const of its own, or use anyOf"
    )


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    python_types: dict[str, Any] = {
        "object": Mapping,
        "array": list,
        "string": str,
        "number": int | float,
        "integer": int,
        "null": type(None),
    }
    is_whole = kind == "integer" and isinstance(value, float) and value.is_integer()
    return is_whole or isinstance(value, python_types[kind])


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number) and abs(number) < 1 << 63
    except OverflowError:
        return False


def _entries(schema: Mapping[str, Any], name: str, where: str) -> list[tuple[str, Any]]:
    entries = schema.get(name, {})
    if not isinstance(entries, Mapping):
        raise RequestError(f"{where}.{name} must be an object, got {shown(entries)}")
    return list(entries.items())


def _listed(
    schema: Mapping[str, Any], name: str, where: str, *, is_empty_ok: bool = False
) -> list[Any]:
    if name not in schema:
        return []
    listed = schema[name]
    if not isinstance(listed, list) or not (listed or is_empty_ok):
        raise RequestError(f"{where}.{name} must be a list of one or more, got {shown(listed)}")
    return listed
