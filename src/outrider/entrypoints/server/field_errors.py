"""Which field of a body is wrong, and why, in one line."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from outrider.entrypoints.server.errors import ApiError, invalid
from outrider.errors import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic import ValidationError


def refuse_unsupported(
    where: str, body: Mapping[str, Any], unsupported: Mapping[str, tuple[object, ...]]
) -> None:
    """Refuses fields of other servers, unless their value asks for nothing; null does.

    Args:
        where: what stands before the name of a field.
        body: as it was sent.
        unsupported: the fields, with the values that ask for nothing.
    """
    for name, value in body.items():
        neutral = unsupported.get(name)
        if neutral is None or value is None:
            continue
        if not any(type(value) is type(one) and value == one for one in neutral):
            param = f"{where}{name}"
            raise invalid(
                param, f"{param} is not supported, got {shown(value)}", code="unsupported_parameter"
            )


def first_error(error: ValidationError, body: object, known: Iterable[str]) -> ApiError:
    """What pydantic found first, as the answer to the client.

    Args:
        error: of the whole body.
        body: as it was sent.
        known: fields of the body, of which the one nearest to an unknown field is named.
    """
    errors = error.errors(include_url=False, include_context=False)
    found = errors[0]
    if found["type"] == "literal_error" and isinstance(found["input"], dict):
        # One of some words or an object: an object is told what is wrong with it.
        place = found["loc"][:-1]
        found = next((one for one in errors[1:] if one["loc"][: len(place)] == place), found)
    param = _param(found["loc"], body, is_missing=found["type"] == "missing")
    if found["type"] == "extra_forbidden":
        near = difflib.get_close_matches(param, list(known), n=1, cutoff=0.6)
        hint = f"; the nearest is {near[0]}" if near else ""
        return invalid(param, f"unknown field {shown(param)}{hint}", code="unknown_parameter")
    if found["type"] == "missing":
        return invalid(param, f"{param} is missing", code="missing_required_parameter")
    reason = found["msg"].replace("Input should", "must", 1)
    if not reason.startswith("must"):
        reason = f"is wrong: {reason[:1].lower()}{reason[1:]}"
    return invalid(param, f"{param} {reason}, got {shown(found['input'])}")


def _param(loc: tuple[int | str, ...], body: object, *, is_missing: bool) -> str:
    """The place as a client writes it; words that are no part of the body are pydantic's own.

    Args:
        loc: as pydantic has it.
        body: as it was sent.
        is_missing: the last word is what the body lacks.
    """
    name = ""
    for number, part in enumerate(loc):
        if isinstance(body, dict) and isinstance(part, str):
            if part not in body and not (is_missing and number == len(loc) - 1):
                continue
            name = f"{name}.{part}" if name else part
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int):
            name += f"[{part}]"
            body = body[part] if part < len(body) else None
    return name or "body"
