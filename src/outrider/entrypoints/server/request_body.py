"""Reads a JSON object from a request: within its size, in time, and nothing that is no JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from outrider.entrypoints.server.errors import ApiError, invalid
from outrider.errors import shown

if TYPE_CHECKING:
    from starlette.requests import Request

# A client that sends its body slower than this holds a connection for nothing.
BODY_TIMEOUT_S = 60.0
_MAX_DEPTH = 32
_SURROGATE = re.compile("[\ud800-\udfff]")


async def read_json_object(request: Request, max_body_size: int) -> dict[str, Any]:
    """The object in a request's body.

    NaN and infinities are let through, so that the field that holds one can be named.

    Raises:
        ApiError: it is no object of JSON, or too large, or too slow.
    """
    _check_content_type(request)
    data = await _read(request, max_body_size)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise invalid(
            None, f"the body is no valid JSON at character {error.pos + 1}: {error.msg}"
        ) from None
    except (RecursionError, ValueError):
        raise invalid(
            None, "the body is no valid JSON: nested too deep or a number too long"
        ) from None
    if not isinstance(value, dict):
        raise invalid(None, f"the body must be a JSON object, got {shown(value)}")
    _check_values("", value, _MAX_DEPTH)
    return value


def _check_content_type(request: Request) -> None:
    """Only what a page of another site cannot send without being asked first (CSRF)."""
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = re.fullmatch(r"\s*(?:charset\s*=\s*\"?utf-8\"?\s*)?", parameters, re.IGNORECASE)
    if kind.strip().lower() != "application/json" or charset is None:
        raise ApiError(415, "content-type must be application/json, in UTF-8", param="content-type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "content-encoding is not supported", param="content-encoding")


async def _read(request: Request, max_body_size: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > max_body_size):
        raise _too_large(max_body_size)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > max_body_size:
                    raise _too_large(max_body_size)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not come within {BODY_TIMEOUT_S:.0f} s",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        # Nobody reads this.
        raise ApiError(400, "the body is not complete") from None
    return bytes(data)


def _too_large(max_body_size: int) -> ApiError:
    # What is left of the body is not read.
    return ApiError(
        413,
        f"the body has more than {max_body_size} bytes (--max-body-size)",
        param="body",
        headers={"connection": "close"},
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise invalid(twice, f"{shown(twice)} is given twice")
    return values


def _check_values(where: str, value: object, depth: int) -> None:
    """No nesting without end, and no text that UTF-8 cannot hold."""
    if isinstance(value, str):
        match = _SURROGATE.search(value)
        if match is not None:
            raise invalid(
                where,
                f"{where} is no valid Unicode text: {shown(match[0])} at character {match.start()}",
            )
    elif isinstance(value, dict | list):
        if not depth:
            raise invalid(where, f"{where} is nested too deep")
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            if isinstance(key, str) and _SURROGATE.search(key):
                raise invalid(where or None, f"the key {shown(key)} is no valid Unicode text")
            if not isinstance(entry, str | dict | list):
                continue
            inner = (
                f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}" if where else key
            )
            _check_values(inner, entry, depth - 1)
