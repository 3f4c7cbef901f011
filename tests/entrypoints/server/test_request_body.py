from typing import Any

import pytest

from outrider.entrypoints.server import request_body
from tests.entrypoints.server.app_client import AppClient, error_of
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM

JSON = {"content-type": "application/json"}


def client(**options: Any) -> AppClient:
    return AppClient.over(ScriptedLLM(HELLO), **options)


def send(content: bytes, **headers: str) -> Any:
    return client().post("/v1/completions", content=content, headers={**JSON, **headers})


BAD_BODIES = {
    "empty": (b"", None),
    "cut": (b'{"prompt": "a"', None),
    "no json": (b"prompt=a", None),
    "a list": (b'["a"]', None),
    "null": (b"null", None),
    "a number": (b"1", None),
    "bytes of no text": (b'{"prompt": "\xff"}', None),
    "utf-16": ('{"prompt": "a"}'.encode("utf-16"), None),
    "a mark in front": (b'\xef\xbb\xbf{"prompt": "a"}', None),
    "two at once": (b'{"prompt": "a"}{"prompt": "a"}', None),
    "a key twice": (b'{"prompt": "a", "n": 1, "n": 2}', "n"),
    "a key twice inside": (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "1"),
    "no end of lists": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "deep lists": (b'{"prompt": ' + b"[" * 50 + b"]" * 50 + b"}", "prompt" + "[0]" * 31),
    "a number without end": (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", None),
    "half a character": (b'{"prompt": "a\\ud800"}', "prompt"),
    "half a character inside": (b'{"prompt": "a", "stop": ["b", "\\udc00"]}', "stop[1]"),
    "half a character as key": (b'{"prompt": "a", "\\ud800": 1}', None),
    "a line break in a key": (b'{"a\\nb": {"c": "\\ud800"}}', "a\nb.c"),
    "half a character as inner key": (b'{"logit_bias": {"\\ud800": 1}}', "logit_bias"),
}


@pytest.mark.parametrize(("content", "param"), BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_what_is_no_json_object_is_told(content: bytes, param: str | None) -> None:
    response = send(content)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_a_whole_pair_of_halves_is_a_character() -> None:
    assert send(b'{"prompt": "\\ud83d\\ude00"}').status_code == 200


@pytest.mark.parametrize("content_type", ["application/json;charset=utf-8", "Application/JSON ; "])
def test_json_in_utf_8_is_taken(content_type: str) -> None:
    assert send(b'{"prompt": "a"}', **{"content-type": content_type}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"content-type": "application/json; charset=latin-1"}, {"content-encoding": "gzip"}],
)
def test_other_codings_are_refused(headers: dict[str, str]) -> None:
    assert send(b'{"prompt": "a"}', **headers).status_code == 415


@pytest.mark.parametrize("is_told", [True, False])
def test_a_large_body_is_refused_by_its_header_and_by_its_bytes(is_told: bool) -> None:
    served = client(max_body_size=100)

    async def chunks() -> Any:
        yield b'{"prompt": "'
        yield b"a" * 1000

    content = b" " * 101 if is_told else chunks()
    response = served.post("/v1/completions", content=content, headers=JSON)
    assert (response.status_code, error_of(response)["param"]) == (413, "body")
    fits = b'{"prompt": "a"}'.ljust(100)
    assert served.post("/v1/completions", content=fits, headers=JSON).status_code == 200


def test_a_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.01)

    async def chunks() -> Any:
        import asyncio

        yield b"{"
        await asyncio.sleep(5)

    assert client().post("/v1/completions", content=chunks(), headers=JSON).status_code == 408
