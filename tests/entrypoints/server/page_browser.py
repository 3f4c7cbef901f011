"""The page in a headless Chromium, and all that the browser complains of."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from outrider.config import ServerConfig
from tests.entrypoints.server.app_client import bundled_served_model, bundled_tokenizer
from tests.entrypoints.server.running_server import running_server
from tests.entrypoints.server.scripted_llm import Part, ScriptedLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: apt-get install chromium"
)


@dataclass
class OpenPage:
    """A page of a server over a scripted engine.

    Attributes:
        page: in the browser.
        llm: behind the server.
        complaints: what the browser writes to its console, and addresses of elsewhere.
    """

    page: Page
    llm: ScriptedLLM
    complaints: list[str] = field(default_factory=list)

    def write(self, script: list[Part | None]) -> None:
        """Lets the model write by a script, and waits for the end of it."""
        self.llm.script = script
        self.page.get_by_role("button", name="Write").click()
        self.page.get_by_text("Done.").wait_for()


@contextmanager
def open_page(browser: Browser, script: list[Part | None], **options: Any) -> Iterator[OpenPage]:
    """The page, from a server of its own; at the end nothing has been complained of.

    Args:
        browser: that shows it.
        script: of the engine.
        options: `api_key` of the server; others of the browser's context.
    """
    llm = ScriptedLLM(script)
    config = ServerConfig(port=0, api_key=options.pop("api_key", None))
    with running_server(llm, bundled_served_model(), config) as server:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        context.set_default_timeout(20_000)
        page = context.new_page()
        opened = OpenPage(page, llm)

        def check_request(url: str) -> None:
            if not url.startswith(f"{server.url}/"):
                opened.complaints.append(f"asked for {url}")

        page.on("console", lambda message: opened.complaints.append(message.text))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("dialog", lambda dialog: opened.complaints.append(dialog.message))
        page.on("request", lambda request: check_request(request.url))
        try:
            page.goto(server.url)
            yield opened
        finally:
            context.close()
    assert opened.complaints == []


def in_steps(text: str, num_drafts: int = 3) -> list[Part | None]:
    """A script that writes a text in full steps."""
    token_ids = bundled_tokenizer().encode(text)
    width = num_drafts + 1
    script: list[Part | None] = [
        Part("", token_ids[i : i + width], num_draft_tokens=num_drafts)
        for i in range(0, len(token_ids), width)
    ]
    return [*script, Part("", list(bundled_tokenizer().eos_token_ids[:1]), "stop")]
