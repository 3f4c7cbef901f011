"""Whatever a body holds, the answer is a result or a 4xx that says why, and the server goes on."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.entrypoints.server.chat_protocol import ChatBody, TokenizeBody
from outrider.entrypoints.server.protocol import CompletionBody, DetokenizeBody
from tests.entrypoints.server.app_client import AppClient, error_of

# What each field may well be; a run of the tiny model stays short.
SOUND: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "max_tokens": st.integers(0, 6),
    "max_completion_tokens": st.integers(1, 6),
    "min_tokens": st.integers(0, 7),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 5000),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 1e300),
    "logit_bias": st.dictionaries(st.integers(0, 4200).map(str), st.floats(-100, 100), max_size=5),
    "stop": st.text(max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 2**31), max_size=3),
    "bad_words": st.lists(st.text(min_size=1, max_size=4), max_size=3),
    "prompt": st.text(max_size=40)
    | st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3)
    | st.lists(st.integers(0, 4200), min_size=1, max_size=140)
    | st.lists(st.lists(st.integers(0, 4095), min_size=1, max_size=5), min_size=1, max_size=3),
    "tokens": st.lists(st.integers(0, 4200), max_size=40),
    "messages": st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant", "developer", "tool"]),
                "content": st.text(max_size=20),
            }
        ),
        max_size=3,
    ),
    "tools": st.lists(
        st.fixed_dictionaries(
            {
                "type": st.just("function"),
                "function": st.fixed_dictionaries(
                    {"name": st.sampled_from(["f", "g"])},
                    optional={
                        "description": st.text(max_size=5),
                        "parameters": st.just({"type": "object", "properties": {"a": {}}}),
                        "strict": st.booleans(),
                    },
                ),
            }
        ),
        max_size=2,
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required"])
    | st.just({"type": "function", "function": {"name": "f"}}),
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["enable_thinking", "tools"]), st.booleans(), max_size=1
    ),
    "logprobs": st.integers(0, 21) | st.booleans(),
    "top_logprobs": st.integers(0, 21),
    "prompt_logprobs": st.integers(0, 21),
    "num_speculative_tokens": st.integers(0, 4),
    "rejection_sample_method": st.sampled_from(["standard", "block", "coupled"]),
    "best_of": st.integers(1, 3),
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}},
        ]
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["regex", "grammar", "choice", "json", "json_object"]),
        st.sampled_from(["a+", "(?=a)", 'root ::= "a"', ["a", "b"], {"type": "null"}, True, "{}"]),
        max_size=2,
    ),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
}
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400, "\ud800", "", "\x00", 1e308])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
BYTES = st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode())


BODIES = {
    "/v1/completions": (CompletionBody, "prompt"),
    "/v1/chat/completions": (ChatBody, "messages"),
    "/tokenize": (TokenizeBody, "prompt"),
    "/detokenize": (DetokenizeBody, "tokens"),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """An address and a body: mostly sound fields, some that are not."""
    path = draw(st.sampled_from([*BODIES, "/v1/completions", "/v1/chat/completions"]))
    if draw(st.integers(0, 15)) == 0:
        return path, draw(BYTES)
    cls, needed = BODIES[path]
    # Without a limit a chat would run to the model's length.
    body: dict[str, Any] = {"max_tokens": 4} if path.startswith("/v1") else {}
    names = draw(st.lists(st.sampled_from(sorted(cls.model_fields)), max_size=5, unique=True))
    for name in [needed, *names]:
        body[name] = draw(SOUND.get(name, st.booleans()))
    for name in draw(
        st.lists(st.sampled_from(sorted({*cls.model_fields, *cls.UNSUPPORTED})), max_size=1)
    ):
        body[name] = draw(JUNK)
    if draw(st.integers(0, 15)) == 0:
        body[draw(st.text(max_size=5))] = draw(JUNK)
    return path, json.dumps(body).encode()


def check(client: AppClient, path: str, content: bytes) -> None:
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    if response.status_code == 200:
        if response.headers["content-type"].startswith("application/json"):
            json.loads(response.text, parse_constant=pytest.fail)
            return
        lines = response.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], response.text
        for line in lines[:-2]:
            assert "error" not in json.loads(
                line.removeprefix("data: "), parse_constant=pytest.fail
            )
        return
    assert 400 <= response.status_code < 500, (content, response.text)
    assert response.status_code == 404 or error_of(response)["type"] == "invalid_request_error"


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(real_client: AppClient, async_llm: Any) -> Iterator[None]:
    """After all that the engine serves, and has taken back what it gave."""
    yield
    assert real_client.complete(max_tokens=2).status_code == 200
    engine = async_llm.llm_engine
    engine.cache_manager.check_integrity()
    assert not engine.has_unfinished_requests()


SETTINGS = {"suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=200, **SETTINGS)
@given(bodies())
def test_no_body_is_the_servers_fault(real_client: AppClient, case: tuple[str, bytes]) -> None:
    check(real_client, *case)


@pytest.mark.slow
@settings(max_examples=5000, **SETTINGS)
@given(bodies())
def test_no_body_of_many_is_the_servers_fault(
    real_client: AppClient, case: tuple[str, bytes]
) -> None:
    check(real_client, *case)
