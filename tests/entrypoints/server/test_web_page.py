"""The files of the page: what they may load, how they are served, and to whom."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from outrider.entrypoints.server import web_page
from outrider.entrypoints.server.web_page import PAGE_FILES
from tests.entrypoints.server.app_client import AppClient, error_of
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM

FOLDER = Path(web_page.__file__).parent / "page"
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}
SVG_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
# What makes markup or code of a text.
FORBIDDEN = re.compile(
    r"\b(innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|setHTML\w*|"
    r"srcdoc|document\.write\w*|eval|Function|importScripts|localStorage|cookie)\b"
)


class Markup(HTMLParser):
    """What a page links to, and what stands inline in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.inline: list[str] = []
        self.ids: list[str] = []
        self.labelled: set[str] = set()
        self.fields: set[str] = set()
        self._is_in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.links += [named[name] for name in ("src", "href") if name in named]
        self.inline += [name for name in named if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag == "style" else []
        self.ids += [named["id"]] if "id" in named else []
        self._is_in_script = tag == "script"
        if tag == "label" and "for" in named:
            self.labelled.add(named["for"])
        if tag in ("input", "select", "textarea") and named.get("type") != "radio":
            self.fields.add(named["id"])

    def handle_data(self, data: str) -> None:
        if self._is_in_script and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._is_in_script = False


def test_every_file_is_served_with_its_type_and_the_policy() -> None:
    client = AppClient.over(ScriptedLLM(HELLO))
    assert {name for name, _ in PAGE_FILES.values()} == set(FILES)
    for path, (name, media_type) in PAGE_FILES.items():
        response = client.get(path)
        assert (response.status_code, response.text) == (200, FILES[name])
        assert response.headers["content-type"] == media_type
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = response.headers["content-security-policy"].split("; ")
        assert "default-src 'none'" in policy
        sources = {one.partition(" ")[2] for one in policy if "-src" in one}
        assert sources == {"'none'", "'self'"}
        assert {"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= set(policy)
        assert {"require-trusted-types-for 'script'", "trusted-types 'none'"} <= set(policy)
    assert client.get("/page/../gate.py").status_code == 404
    assert client.get("/page/").status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup(name: str) -> None:
    text = FILES[name].replace(SVG_NAMESPACE, "")
    assert not re.search(r"https?:|[\"'(]//|@import|data:[a-z]|url\(", text)
    assert not FORBIDDEN.search(text)


def test_scripts_import_each_other_by_addresses_that_are_served() -> None:
    for name, text in FILES.items():
        if name.endswith(".js"):
            imported = re.findall(r"(?:from|import)\s*\(?\s*\"([^\"]+)\"", text)
            assert set(imported) <= set(PAGE_FILES), name


def test_the_page_has_nothing_inline_and_a_label_for_every_field() -> None:
    markup = Markup(FILES["index.html"])
    assert markup.inline == []
    assert set(markup.links) <= set(PAGE_FILES)
    assert {"/page/main.js", "/page/page.css"} <= set(markup.links)
    assert len(markup.ids) == len(set(markup.ids))
    assert markup.fields == {"key", "prompt", "drafts", "temperature", "rule", "max-tokens"}
    assert markup.fields <= markup.labelled
    wanted = set(re.findall(r'byId\("([^"]+)"\)', FILES["main.js"]))
    assert wanted <= set(markup.ids)


@pytest.mark.parametrize(
    "broken", ['<b onclick="x()">', "<style>b{}</style>", '<p style="x">', "<script>x()</script>"]
)
def test_what_is_inline_is_found(broken: str) -> None:
    assert Markup(broken).inline


def test_the_page_is_open_where_a_key_is_wanted_and_what_it_asks_for_is_not() -> None:
    client = AppClient.over(ScriptedLLM(HELLO), api_key="secret")
    for path in PAGE_FILES:
        response = client.get(path)
        assert (response.status_code, "secret" in response.text) == (200, False)
    for path in ("/v1/models", "/page", "/page/", "/page/nothing.js", "/page/main.js/x"):
        assert client.get(path).status_code == 401
    foreign = client.get("/", headers={"host": "evil.example"})
    assert (foreign.status_code, error_of(foreign)["param"]) == (403, "host")


def test_the_page_learns_what_it_may_ask_for() -> None:
    (card,) = AppClient.over(ScriptedLLM(HELLO)).get("/v1/models").json()["data"]
    assert (card["id"], card["num_speculative_tokens"], card["max_model_len"]) == ("tiny", 3, 256)


def test_no_file_is_longer_than_a_module_may_be() -> None:
    assert [name for name, text in FILES.items() if len(text.splitlines()) > 400] == []
