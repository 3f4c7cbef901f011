"""The page at /, on which one watches drafts being accepted: its files, and the rules they obey."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi import FastAPI

_FOLDER = Path(__file__).parent / "page"
_SCRIPT = "text/javascript; charset=utf-8"
# By address: the file, and its type.
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/main.js": ("main.js", _SCRIPT),
    "/page/server.js": ("server.js", _SCRIPT),
    "/page/tally.js": ("tally.js", _SCRIPT),
    "/page/text.js": ("text.js", _SCRIPT),
    "/page/charts.js": ("charts.js", _SCRIPT),
}
# Nothing from elsewhere, nothing inline, no text that becomes markup, no frame around it.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serves the files of the page, which are read once."""
    for path, (name, media_type) in PAGE_FILES.items():
        app.get(path, include_in_schema=False)(_sends((_FOLDER / name).read_bytes(), media_type))


def _sends(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return send
