"""The strings of a JSON schema, as expressions over the text of the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.grammar.regex import rewrite_regex

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Of the formats, those that the library takes without end or takes wrongly.
_OWN_FORMATS = {
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
}


def rewrite_strings(schema: Any, where: str) -> Any:
    """A checked schema in which the library holds every string to what is asked of it.

    Args:
        schema: not changed.
        where: how an error names it.

    Raises:
        RequestError: a pattern that no grammar can follow.
    """
    if isinstance(schema, list):
        return [rewrite_strings(one, f"{where}[{index}]") for index, one in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    written = {
        name: value
        if name in ("enum", "const", "default", "examples", "required")
        else _rewrite_named(value, f"{where}.{name}")
        if name in ("properties", "$defs", "definitions")
        else rewrite_strings(value, f"{where}.{name}")
        for name, value in schema.items()
    }
    pattern = _pattern(written)
    if pattern is None:
        return written
    written["pattern"] = rewrite_regex(pattern, f"{where}.pattern", in_json=True)
    for name in ("minLength", "maxLength", "format"):
        written.pop(name, None)
    return written


def _rewrite_named(schemas: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Schemas by names, which may be those of keywords."""
    return {name: rewrite_strings(one, f"{where}.{name}") for name, one in schemas.items()}


def _pattern(schema: Mapping[str, Any]) -> str | None:
    """An expression for what a schema asks of a string, None where the library knows it."""
    if "pattern" in schema:
        return str(schema["pattern"])
    if "minLength" in schema or "maxLength" in schema:
        return rf"[\s\S]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return _OWN_FORMATS.get(schema.get("format", ""))
