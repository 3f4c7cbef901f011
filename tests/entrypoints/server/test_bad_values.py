"""Each field of each body with values that no field should trust: what the schema does not allow is
refused by the field's name, before anything is streamed, and the next request works."""

import json
import math
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from outrider.entrypoints.server.chat_protocol import ChatBody, TokenizeBody
from outrider.entrypoints.server.protocol import CompletionBody, DetokenizeBody, RequestBody
from tests.entrypoints.server.app_client import AppClient, error_of
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM

SAYS: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
# By address: the body, and the least that it must hold.
BODIES: dict[str, tuple[type[RequestBody], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "a"}),
    "/v1/chat/completions": (ChatBody, {"messages": SAYS}),
    "/tokenize": (TokenizeBody, {"prompt": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
}
# As JSON, since some have no other spelling.
VALUES = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "-1", "1.5", "1e300", str(2**63),
    str(-(2**63) - 1), str(10**400), "true", "false", "null", "[]", "{}", "[null]", "[[]]",
    "[true]", "[-1]", "[1e400]", '""', '"\\ud800"', '["\\udc00"]', '{"\\ud800": 1}', '"\\u0000"',
    '{"a": NaN}',
)  # fmt: skip


@cache
def validator(body: type[RequestBody]) -> Draft202012Validator:
    told = AppClient.over(ScriptedLLM(HELLO)).get("/openapi.json").json()
    wanted = {"$ref": f"#/components/schemas/{body.__name__}", "components": told["components"]}
    return Draft202012Validator(wanted)


def is_text_and_finite(value: object) -> bool:
    """Whether UTF-8 and JSON can hold it, of which a schema of JSON says nothing."""
    if isinstance(value, dict):
        return all(map(is_text_and_finite, [*value, *value.values()]))
    if isinstance(value, list):
        return all(map(is_text_and_finite, value))
    if isinstance(value, str):
        return not any("\ud800" <= char <= "\udfff" for char in value)
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("path", BODIES)
def test_what_a_field_does_not_allow_is_named(path: str) -> None:
    body_class, least = BODIES[path]
    client = AppClient.over(ScriptedLLM(HELLO))
    streams = {"stream": True} if path.startswith("/v1") else {}
    headers = {"content-type": "application/json"}
    num_refused = 0
    for name in body_class.model_fields:
        for value in VALUES:
            given = {**least, **streams, name: json.loads(value)}
            inner = ", ".join(
                f"{json.dumps(key)}: {value if key == name else json.dumps(one)}"
                for key, one in given.items()
            )
            response = client.post(path, content=f"{{{inner}}}".encode(), headers=headers)
            if response.status_code == 200:
                assert is_text_and_finite(given[name]), (name, value)
                assert validator(body_class).is_valid(given), (name, value)
                continue
            assert response.status_code in (400, 404), (name, value, response.text)
            assert response.headers["content-type"] == "application/json"
            param = error_of(response)["param"] or ""
            is_allowed = is_text_and_finite(given[name]) and validator(body_class).is_valid(given)
            # What is allowed may still not go with the rest, and a number without end is no JSON.
            if not is_allowed and value != str(10**400):
                assert param.partition("[")[0].partition(".")[0] == name, (name, value, param)
            num_refused += 1
        assert client.post(path, least).status_code == 200
    assert num_refused > 15 * len(body_class.model_fields)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", ["", "gpt", "Tiny", "tiny ", "../tiny", "\x00"])
def test_a_model_that_is_not_served_is_named(path: str, model: str) -> None:
    client = AppClient.over(ScriptedLLM(HELLO))
    streams = {"stream": True} if path.startswith("/v1") else {}
    response = client.post(path, {**BODIES[path][1], **streams, "model": model})
    assert (response.status_code, error_of(response)["param"]) == (404, "model")
    assert client.post(path, {**BODIES[path][1], "model": "tiny"}).status_code == 200


LAST = 4095


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("/v1/completions", {"prompt": [LAST, LAST + 1]}, "prompt"),
        ("/v1/completions", {"prompt": [1, 2**62]}, "prompt"),
        ("/v1/completions", {"prompt": [1, 2**64]}, "prompt"),
        ("/v1/completions", {"prompt": [1, -1]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [LAST + 1]]}, "prompt[1]"),
        ("/v1/completions", {"logit_bias": {str(LAST + 1): 1}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {str(10**17): 1}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {"9" * 19: 1}}, "logit_bias"),
        ("/v1/chat/completions", {"logit_bias": {str(LAST + 1): 1}}, "logit_bias"),
        ("/detokenize", {"tokens": [LAST, LAST + 1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**64]}, "tokens[0]"),
    ],
)
def test_ids_that_the_vocabulary_does_not_have_are_named(
    real_client: AppClient, path: str, given: dict[str, Any], param: str
) -> None:
    streams = {"stream": True, "max_tokens": 1} if path.startswith("/v1") else {}
    response = real_client.post(path, {**BODIES[path][1], **streams, **given})
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert real_client.complete(prompt=[LAST], max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("/v1/completions", {"prompt": "a b " * 100_000}, "prompt"),
        ("/v1/completions", {"prompt": [7] * 200_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b " * 20_000]}, "prompt[1]"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a b " * 20_000}]},
            "messages",
        ),
        ("/detokenize", {"tokens": [7] * 200_000 + [-1]}, "tokens[200000]"),
    ],
    ids=["text", "ids", "texts", "chat", "tokens"],
)
def test_what_is_far_too_long_is_named(
    real_client: AppClient, path: str, given: dict[str, Any], param: str
) -> None:
    response = real_client.post(path, given)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert len(response.content) < 1000
    assert real_client.complete(max_tokens=1).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_body_past_the_limit_is_refused_at_every_address(path: str) -> None:
    client = AppClient.over(ScriptedLLM(HELLO), max_body_size=1000)
    response = client.post(path, {**BODIES[path][1], "user": "a" * 1000})
    assert (response.status_code, error_of(response)["param"]) == (413, "body")
    assert client.post(path, BODIES[path][1]).status_code == 200
