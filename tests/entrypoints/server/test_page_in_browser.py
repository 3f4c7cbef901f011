"""What a user sees of the page, in a real browser; any violation of its policy is a failure."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

from tests.entrypoints.server.page_browser import (
    CHROMIUM,
    in_steps,
    needs_chromium,
    open_page,
)
from tests.entrypoints.server.scripted_llm import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Locator, Page

    from tests.entrypoints.server.page_browser import OpenPage

pytestmark = [pytest.mark.browser, needs_chromium]

MAIN_PROMPT = "def main("
PLAIN: list[Part | None] = [Part("", [40], num_draft_tokens=0), Part("", [41], "length")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # While it runs no other event loop can, so no other module may share it.
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM)
        yield launched
        launched.close()


def until(condition: Callable[[], bool], page: Page) -> None:
    """Waits as the page does: what it says is heard in calls of the browser's library alone."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(10)


def style(locator: Locator, name: str) -> str:
    return str(locator.evaluate("(element, name) => getComputedStyle(element)[name]", name))


def texts(locator: Locator) -> list[str]:
    return [str(text) for text in locator.all_text_contents()]


def bars(page: Page, chart: str) -> list[str]:
    """Classes of the bars of a chart."""
    return [bar.get_attribute("class") or "" for bar in page.locator(f"#{chart} .bar").all()]


def test_a_text_appears_step_by_step_in_the_colours_of_its_sources(browser: Browser) -> None:
    script = [Part("", [40]), Part("", [41, 42, 43, 44], num_draft_tokens=3), None]
    with open_page(browser, script) as opened:
        page = opened.page
        page.get_by_text("Outrider serves tiny").wait_for()
        assert not page.get_by_label("API key").is_visible()
        page.get_by_label("Your text").fill(MAIN_PROMPT)
        page.get_by_role("button", name="Write").click()
        page.locator(".pass").nth(1).wait_for()
        # It is there while the model still writes.
        assert page.locator("#status").text_content() == "The model writes …"
        assert page.locator("#text .prompt").text_content() == MAIN_PROMPT
        assert page.get_by_role("button", name="Write").is_disabled()
        page.locator("#timeline .bar").nth(4).wait_for()
        assert len(bars(page, "timeline")) == 5
        opened.llm.script[2] = Part("", [45, 46], "length", num_draft_tokens=3)
        page.get_by_text("Done. 7 tokens in 3 passes of the model.").wait_for()
        assert opened.llm.prompts[0].text == MAIN_PROMPT

        tokens = page.locator("#text .token")
        sources = [token.get_attribute("data-source") for token in tokens.all()]
        kept = ["accepted_1", "accepted_2", "accepted_3"]
        assert sources == ["plain", *kept, "bonus", "accepted_1", "recovered"]
        for kind in (*kept, "recovered", "bonus", "plain"):
            name = kind.replace("_", "-")
            shown = style(page.locator(f"#text .{name}").first, "backgroundColor")
            assert shown == style(page.locator(f"#legend .{name}"), "backgroundColor")
        colours = {style(token, "backgroundColor") for token in tokens.all()}
        assert len(colours) == 6
        assert texts(page.locator("#legend .count")) == ["2", "1", "1", "1", "1", "1"]
        assert page.locator("#per-pass").text_content() == "2.33"
        assert page.locator("#kept").text_content() == "67 %"
        assert re.fullmatch(r"\d+\.\d", page.locator("#speed").text_content() or "")
        told = "guess 1: 100 %, 2 of 2; guess 2: 50 %, 1 of 2; guess 3: 50 %, 1 of 2"
        assert page.locator("#positions").get_attribute("aria-label") == told
        heights = [
            float(bar.get_attribute("height") or 0) for bar in page.locator("#positions .bar").all()
        ]
        assert heights[0] == 2 * heights[1] == 2 * heights[2] > 0
        assert bars(page, "timeline")[-2:] == ["bar accepted-1", "bar recovered"]


def test_switches_reach_the_engine_and_runs_stand_side_by_side(browser: Browser) -> None:
    with open_page(browser, []) as opened:
        page = opened.page
        assert not page.get_by_role("table").is_visible()
        # By keyboard alone.
        page.get_by_label("Guesses (K)").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        page.get_by_label("Temperature").press("ArrowRight")
        page.get_by_label("Rule of the check").select_option("block")
        page.get_by_label("Tokens at most").fill("17")
        assert page.locator("#drafts-shown").text_content() == "1"
        assert "together" in (page.locator("#rule-note").text_content() or "")
        opened.write(in_steps("import os", 1))
        page.get_by_label("Guesses (K)").press("Home")
        page.get_by_label("Rule of the check").select_option("coupled")
        opened.write(PLAIN)
        asked = [
            (
                one.num_speculative_tokens,
                one.rejection_sample_method,
                one.temperature,
                one.max_tokens,
            )
            for one in opened.llm.params
        ]
        assert asked == [(1, "block", 0.1, 17), (0, "coupled", 0.1, 17)]
        assert page.locator("#positions").get_attribute("aria-label") == "No guesses"
        assert bars(page, "timeline") == ["bar plain", "bar plain"]
        rows = [texts(row.locator("td")) for row in page.locator("#runs tbody tr").all()]
        assert [row[:3] for row in rows] == [["0", "coupled", "0.1"], ["1", "block", "0.1"]]
        assert rows[0][3:5] == ["2", "1.00"]
        assert rows[1][5] == "100 %"


def test_a_chat(browser: Browser) -> None:
    with open_page(browser, []) as opened:
        page = opened.page
        page.get_by_label("answer me").check()
        page.get_by_label("Your text").fill("hello")
        opened.write(in_steps("hi there"))
        assert "<|im_start|>user\nhello<|im_end|>" in (opened.llm.prompts[0].text or "")
        assert page.locator("#text").text_content() == "hi thereend of text"


def test_what_the_model_writes_stays_text(browser: Browser) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>\n&amp;</div>🎉<b>"
    with open_page(browser, []) as opened:
        page = opened.page
        page.get_by_label("Your text").fill(hostile)
        opened.write(in_steps(hostile))
        assert page.locator("#text").text_content() == f"{hostile}{hostile}end of text"
        assert page.locator("#text :is(script, img, b, div)").count() == 0
        assert page.locator("#text").evaluate("e => e.querySelectorAll('*').length") == (
            page.locator("#text :is(.prompt, .pass, .token)").count()
        )


def test_what_the_policy_forbids_is_seen(browser: Browser) -> None:
    attacks = {
        "TrustedHTML": "() => { document.body.innerHTML = '<b>x</b>' }",
        "inline style": "() => document.body.setAttribute('style', 'color: red')",
        "'http://localhost:1/": "() => { new Image().src = 'http://localhost:1/x.png' }",
    }
    with open_page(browser, []) as opened:
        for told, attack in attacks.items():
            with suppress(PlaywrightError):
                opened.page.evaluate(attack)
            until(lambda told=told: any(told in one for one in opened.complaints), opened.page)
        # What the attacks have brought is all there before it is forgotten.
        opened.page.evaluate("() => 0")
        opened.complaints.clear()


def expect_status(opened: OpenPage, status: int) -> None:
    """Of an answer that is an error Chromium says so, which the page cannot help."""
    until(lambda: bool(opened.complaints), opened.page)
    assert str(status) in opened.complaints.pop(0)


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Browser) -> None:
    with open_page(browser, PLAIN, api_key="secret") as opened:
        page = opened.page
        key = page.get_by_label("API key")
        key.wait_for()
        expect_status(opened, 401)
        assert (page.get_by_role("alert").text_content() or "").startswith(
            "Error: no valid API key"
        )
        key.fill("wrong")
        key.press("Tab")
        expect_status(opened, 401)
        key.fill("€")
        key.press("Tab")
        page.get_by_text("Error: the API key has characters that no key can have").wait_for()
        key.fill("secret")
        key.press("Tab")
        page.get_by_text("Outrider serves tiny").wait_for()
        opened.write(PLAIN)
        page.reload()
        page.get_by_text("Outrider serves tiny").wait_for()
        assert key.get_attribute("type") == "password"
        kept = page.evaluate("() => [sessionStorage.length, localStorage.length, document.cookie]")
        assert kept == [1, 0, ""]
        assert "secret" not in page.url


def test_to_stop_aborts(browser: Browser) -> None:
    with open_page(browser, []) as opened:
        page = opened.page
        for stop in (page.get_by_role("button", name="Stop").click, press_escape(page)):
            opened.llm.script = [Part("", [40]), None]
            page.get_by_label("Your text").press("Control+Enter")
            page.locator(".pass").wait_for()
            assert len(opened.llm.open_ids) == 1
            stop()
            page.get_by_text("Stopped. 1 token in 1 pass of the model.").wait_for()
            until(lambda: not opened.llm.open_ids, page)
            opened.write(PLAIN)


def press_escape(page: Page) -> Callable[[], None]:
    return lambda: page.keyboard.press("Escape")


def test_errors_are_one_line_and_the_next_run_works(browser: Browser) -> None:
    with open_page(browser, PLAIN) as opened:
        page = opened.page
        alert = page.get_by_role("alert")
        opened.llm.refusal = "the prompt is not liked"
        page.get_by_role("button", name="Write").click()
        alert.get_by_text("Error: the prompt is not liked").wait_for()
        expect_status(opened, 400)
        opened.llm.refusal = None
        opened.write(PLAIN)
        assert alert.text_content() == ""
        # In the midst of a text.
        opened.llm.script = [Part("", [40]), Part("", [], "error")]
        page.get_by_role("button", name="Write").click()
        alert.get_by_text("Error: the model's probabilities were not finite").wait_for()
        assert page.locator("#status").text_content() == ""
        page.get_by_label("Tokens at most").fill("0")
        page.get_by_role("button", name="Write").click()
        assert len(opened.llm.params) == 2


def luminance(colour: list[float]) -> float:
    """Of WCAG 2, of a colour in 0 to 255."""
    parts = [one / 255 for one in colour]
    red, green, blue = (
        one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colours: list[str]) -> float:
    """Of two colours as style sheets tell them."""
    light, dark = sorted(
        (luminance([float(x) for x in re.findall(r"[\d.]+", one)[:3]]) for one in colours),
        reverse=True,
    )
    return (light + 0.05) / (dark + 0.05)


# Of each visible element that has a text of its own: the text, its colour, and what is behind it.
COLOURS = """() => [...document.querySelectorAll("body *")]
    .filter((e) => e.checkVisibility() && !e.disabled && !e.ownerSVGElement)
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => {
        const colour = getComputedStyle(e).color;
        let behind = e;
        while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)")
            behind = behind.parentElement;
        return [e.textContent, colour, getComputedStyle(behind).backgroundColor];
    })"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_light_and_dark(browser: Browser, scheme: Any) -> None:
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    with open_page(browser, [], **options, reduced_motion="reduce") as opened:
        page = opened.page
        opened.write(in_steps("def read_lines(path):\n    return " + "a" * 200))
        assert page.evaluate("() => document.documentElement.scrollWidth") == 360
        found = page.evaluate(COLOURS)
        assert len(found) > 60
        assert [one for one in found if contrast(one[1:]) < 4.5] == []
        background = style(page.locator("body"), "backgroundColor")
        assert background == {"light": "rgb(251, 250, 247)", "dark": "rgb(20, 23, 26)"}[scheme]
        opened.llm.script = [Part("", [40]), None]
        page.get_by_role("button", name="Write").click()
        page.locator("#text.is-writing").wait_for()
        animation = "e => getComputedStyle(e, '::after').animationName"
        assert page.locator("#text").evaluate(animation) == "none"
