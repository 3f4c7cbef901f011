"""What /openapi.json says is so: bodies made from it are never the server's fault, and every answer
has a status, a content type and a shape that it tells of."""

from collections import Counter
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import positive_data_acceptance

from outrider.entrypoints.server.answer import Sums
from tests.entrypoints.server.app_client import BASE_URL, AppClient
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM

PARSERS = {
    "reasoning_parser": "qwen3",
    "tool_call_parser": "qwen3_coder",
    "enable_auto_tool_choice": True,
}


@cache
def document() -> dict[str, Any]:
    """The schema, of which answers hold nothing that it does not name."""
    told = AppClient.over(ScriptedLLM(HELLO), **PARSERS).get("/openapi.json").json()
    for schema in told["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return told


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
JSON_SCHEMA = {"name": "a", "schema": {"type": "integer"}, "strict": True}


def number(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


TEXT = {"type": "string", "minLength": 1, "maxLength": 12}
IDS = {"type": "array", "items": number(0, 4095), "minItems": 1, "maxItems": 40}
# What of each field the tiny model takes, and runs in a short time.
NARROW: dict[str, dict[str, Any]] = {
    "model": {"enum": ["tiny"]},
    "prompt": {
        "anyOf": [TEXT, IDS, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}]
    },
    "messages": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT},
            "required": ["role", "content"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 2,
    },
    "tokens": IDS,
    "n": number(1, 3),
    "max_tokens": number(1, 6),
    "max_completion_tokens": number(1, 6),
    "min_tokens": number(0, 1),
    "logprobs": number(0, 20),
    "top_logprobs": number(0, 20),
    "prompt_logprobs": number(0, 20),
    "num_speculative_tokens": number(0, 3),
    "stop_token_ids": {"type": "array", "items": number(0, 4095), "maxItems": 3},
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,3}$": {"type": "number", "minimum": -9, "maximum": 9}},
        "additionalProperties": False,
    },
    "bad_words": {"type": "array", "items": TEXT, "maxItems": 2},
    "stream_options": {"enum": [{"include_usage": True}, {"include_usage": False}]},
    "response_format": {
        "enum": [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": JSON_SCHEMA},
        ]
    },
    "structured_outputs": {
        "enum": [{"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}]
    },
    "tools": {"enum": [[], TOOLS]},
    "tool_choice": {"enum": ["none", "auto", "required"]},
    "chat_template_kwargs": {"enum": [{}, {"enable_thinking": False}]},
}


@cache
def narrow_document() -> dict[str, Any]:
    """A part of what the schema allows, of which most is allowed in fact too."""
    told = deepcopy(document())
    for name in ("CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody"):
        fields = told["components"]["schemas"][name]["properties"]
        fields |= {field: NARROW[field] for field in fields if field in NARROW}
        if name == "ChatBody":
            fields["logprobs"] = {"type": "boolean"}
        if name == "TokenizeBody":
            fields["prompt"] = TEXT
    (name,) = told["paths"]["/v1/models/{name}"]["get"]["parameters"]
    name["schema"] = NARROW["model"]
    return told


def with_integers(value: Any) -> Any:
    """The value, in which 1.0 is 1: an integer to JSON schema, and to the server none."""
    if isinstance(value, dict):
        return {key: with_integers(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(with_integers, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def settled(case: Case) -> Case:
    """The case, in which fields go together: that is said of them in words alone."""
    if not isinstance(case.body, dict):
        return case
    case.body = body = with_integers(case.body)
    if case.path == "/tokenize":
        body.pop("prompt" if "messages" in body else "messages", None)
        if "messages" not in body:
            body.setdefault("prompt", "a")
            body.pop("tools", None)
            body.pop("chat_template_kwargs", None)
    if not case.path.startswith("/v1"):
        return case
    body.pop("max_completion_tokens" if "max_tokens" in body else "", None)
    if "max_completion_tokens" not in body:
        body.setdefault("max_tokens", 2)
    if "top_logprobs" in body:
        body["logprobs"] = True
    if "stream_options" in body:
        body["stream"] = True
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    if "best_of" in body:
        body["best_of"] = body.get("n") or 1
    if "response_format" in body:
        body.pop("structured_outputs", None)
    if "tool_choice" in body:
        body["tools"] = TOOLS
    return case


def check(client: AppClient, case: Case) -> int:
    """Sends a case, holds the answer to the schema, and returns its status."""
    response = case.call(base_url=BASE_URL, app=client.app, timeout=120)
    # Which fields go together is more than the schema can say.
    case.validate_response(response, excluded_checks=[positive_data_acceptance])
    if response.headers["content-type"][0].startswith("text/event-stream"):
        assert response.content.endswith(b"data: [DONE]\n\n"), response.content
    return response.status_code


def cases(told: dict[str, Any], mode: GenerationMode) -> st.SearchStrategy[Case]:
    """Cases of all addresses, most often of those that run the model."""
    schema = schemathesis.openapi.from_dict(told)
    parts = [schema, schema["/v1/completions"]["POST"], schema["/v1/chat/completions"]["POST"]]
    return st.one_of([part.as_strategy(generation_mode=mode) for part in parts])


def run(client: AppClient, strategy: st.SearchStrategy[Case], count: int) -> Counter[int]:
    """How often each status was the answer."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def check_one(case: Case) -> None:
        statuses[check(client, case)] += 1

    check_one()
    assert statuses.total() >= count
    return statuses


def check_bodies(real_client: AppClient, num_sound: int, num_any: int) -> None:
    """Bodies that the model runs, then any that the schema allows, then such as it does not."""
    sound = cases(narrow_document(), GenerationMode.POSITIVE).map(settled)
    statuses = run(real_client, sound, num_sound)
    assert statuses[200] > 0.8 * statuses.total()
    scripted = AppClient.over(ScriptedLLM(HELLO), **PARSERS)
    assert run(scripted, cases(document(), GenerationMode.POSITIVE), num_any)[200]
    statuses = run(scripted, cases(document(), GenerationMode.NEGATIVE), num_any)
    assert statuses[400] > 0.8 * statuses.total()


def test_answers_are_what_the_schema_says(real_client: AppClient) -> None:
    check_bodies(real_client, 80, 25)


@pytest.mark.slow
def test_many_answers_are_what_the_schema_says(real_client: AppClient) -> None:
    check_bodies(real_client, 1000, 500)


def test_a_field_that_the_schema_does_not_tell_of_is_found(
    real_client: AppClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = Sums.usage
    monkeypatch.setattr(Sums, "usage", lambda sums: {**usage(sums), "unheard_of": 1})
    sound = cases(narrow_document(), GenerationMode.POSITIVE).map(settled)
    with pytest.raises(FailureGroup, match="unheard_of"):
        run(real_client, sound, 30)


def test_the_key_is_told_where_it_is_needed() -> None:
    assert "security" not in document()["paths"]["/v1/models"]["get"]
    locked = AppClient.over(ScriptedLLM(HELLO), api_key="secret")
    told = locked.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
    assert told["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    needed = {path: "security" in next(iter(one.values())) for path, one in told["paths"].items()}
    assert [path for path in needed if not needed[path]] == ["/health"]
    assert "401" in told["paths"]["/v1/models"]["get"]["responses"]
