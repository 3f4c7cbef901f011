"""Errors as a client of the OpenAI API reads them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from outrider.errors import ContextLengthError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from outrider.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Parameters that have another name in a body than in SamplingParams.
_FIRST_NAME = re.compile(r"(?:a token id in )?([a-z_]+)(?:\[(\d+)\])?")


class ApiError(Exception):
    """What is answered instead of a result.

    Args:
        status: of the response.
        message: names the thing; white space, of which a client's own words may hold any, becomes
            one line.
        param: the field that is wrong, such as `messages[0].content`; None where none is.
        code: a word for programs.
        headers: of the response, besides the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that OpenAI's clients read."""
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, usual),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The response; what is wrong with one request keeps no connection from the next."""
        return json_response(self.body(), self.status, self.headers)


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A field that is wrong."""
    return ApiError(400, message, param=param, code=code)


def server_fault() -> ApiError:
    """What a client is told of a defect; the log says more."""
    return ApiError(500, "the server failed; its log says why")


def from_request_error(
    error: RequestError, fields: Collection[str], names: Mapping[str, str] | None = None
) -> ApiError:
    """What the engine says of a request, with the field that it speaks of.

    Args:
        error: its message begins with the name of a parameter, where one is wrong.
        fields: of the body.
        names: of the fields, where the body calls a parameter otherwise.
    """
    message = str(error)
    match = _FIRST_NAME.match(message)
    param = None
    if match is not None:
        name = (names or {}).get(match[1], match[1])
        if name in fields:
            param = name if match[2] is None else f"{name}[{match[2]}]"
    if param is None and "logit_bias" in message:
        param = "logit_bias"
    elif param is None and ("prompt" in message or "token id" in message):
        param = "messages" if "messages" in fields else "prompt"
    is_too_long = isinstance(error, ContextLengthError)
    return invalid(param, message, "context_length_exceeded" if is_too_long else None)


def json_bytes(value: object) -> bytes:
    """JSON as it is sent: UTF-8, and no NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate, which only a client's own words can hold, becomes an escape of JSON.
    return text.encode(errors="backslashreplace")


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response that holds a JSON value."""
    return Response(json_bytes(value), status, headers, media_type="application/json")
