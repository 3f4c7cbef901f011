"""Reads options from JSON text and from dicts in which an unknown key is an error."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.errors import ConfigError, shown

# Line breaks become spaces one for one, so that columns stay.
_ONE_LINE = str.maketrans("\n\r\t", "   ")
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_json_object(flag: str, text: str) -> dict[str, Any]:
    """Parse an option given as JSON text.

    Args:
        flag: name of the option as the user wrote it, such as "--speculative-config".
        text: what was given.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{flag}: no valid JSON at column {error.pos + 1}: {_json_hint(text, error)}: "
            f"{text.translate(_ONE_LINE)}"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{flag}: no valid JSON: nested too deep or a number too long") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{flag} must be a JSON object, {{"name": value}}, got {shown(text)}')
    return value


def parse_size(name: str, text: str) -> int:
    """Bytes from a number with an optional unit of 1024: "4G", "512MiB"."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name} must be a number of bytes such as 4GiB, got {shown(text)}")
    return int(match[1]) * _SIZE_UNITS[match[2].upper()]


def read_object(name: str, value: object) -> dict[str, Any] | None:
    """A dict from a dict or JSON text; None stays None."""
    if isinstance(value, str):
        return parse_json_object(name, value)
    if isinstance(value, Mapping):
        return dict(value)
    if value is not None:
        raise ConfigError(f"{name} must be a dict or a JSON object, got {shown(value)}")
    return None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f'"{twice}" is given twice')
    return result


def _json_hint(text: str, error: json.JSONDecodeError) -> str:
    rest = text[error.pos :].lstrip()
    if rest.startswith("'"):
        return "write double quotes, not single ones"
    is_after_comma = text[: error.pos].rstrip().endswith(",")
    if rest.startswith(("}", "]", ",}", ",]")) and (is_after_comma or rest.startswith(",")):
        return "remove the trailing comma"
    if rest.startswith(("True", "False", "None")):
        return "write true, false or null"
    return error.msg[:1].lower() + error.msg[1:]


def take_known(
    where: str,
    values: dict[str, Any],
    known: Iterable[str],
    fixed: Mapping[str, tuple[object, ...]],
    also: Iterable[str] = (),
) -> None:
    """Refuse unknown keys, then drop the options that only have one state, if it is asked for."""
    candidates = [*known, *also, *fixed]
    for key in list(values):
        if key not in candidates:
            near = difflib.get_close_matches(str(key), candidates, n=1, cutoff=0.0)
            raise ConfigError(
                f'unknown option {shown(where + str(key))}; the nearest is "{where}{near[0]}"'
            )
        if key in fixed:
            value = values.pop(key)
            if not any(value == one and type(value) is type(one) for one in fixed[key]):
                allowed = " or ".join(repr(one) for one in fixed[key])
                raise ConfigError(
                    f"{where}{key}: this build supports only {allowed}, got {shown(value)}"
                )
