"""What every request passes first: its id, the Host header, the key; and the line in the log."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders

from outrider.entrypoints.server.errors import ApiError
from outrider.entrypoints.server.web_page import PAGE_FILES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from outrider.config import ServerConfig

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
# Open without a key: who probes whether the server lives has none, and a browser that fetches the
# page cannot send one. The page tells nothing; the key is typed into it.
PUBLIC_PATHS = frozenset({"/health", *PAGE_FILES})
# What may stand in a log and in a header.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d{1,5})?")


class Gate:
    """Wraps the application.

    Every response has an `X-Request-Id`: the client's own, or a new one where it sent none or one
    that is unfit for a log. `scope["state"]` holds it as `request_id`, and as `log` a dict whose
    entries go into the request's line in the log.

    Args:
        app: what is behind the gate.
        config: who may pass.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._key_digest = None if config.api_key is None else _digest(config.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID_HEADER, "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        log: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, log=log)
        status, start = 0, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            try:
                self._check(scope["path"], headers)
            except ApiError as error:
                await error.response()(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            fields = {"request_id": request_id, "method": scope["method"], "path": scope["path"]}
            seconds = round(time.monotonic() - start, 6)
            _write_line("request", {**fields, "status": status, "duration_s": seconds, **log})

    def _check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        match = _HOST.fullmatch(host)
        if match is None or not self._config.allows_host(match[1] or match[2]):
            raise ApiError(
                403,
                "the Host header names none of the hosts of this server (--allowed-host)",
                param="host",
                code="host_not_allowed",
            )
        if self._key_digest is None or path in PUBLIC_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Digests are of one length, and headers are Latin-1.
        given = _digest(key.strip().encode("latin-1", "replace"))
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._key_digest):
            raise ApiError(
                401,
                "no valid API key: send it as Authorization: Bearer KEY",
                param="authorization",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _write_line(event: str, fields: dict[str, Any]) -> None:
    """One line of JSON, in ASCII."""
    logger.info("%s", json.dumps({"event": event, **fields}))
