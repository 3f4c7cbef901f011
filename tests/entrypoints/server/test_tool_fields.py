"""What is wrong with tools, and with calls in messages: each field by its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.errors import ConfigError
from outrider.tokenizer import Tokenizer
from tests.entrypoints.server.app_client import AppClient, bundled_served_model, error_of
from tests.entrypoints.server.scripted_llm import Part, ScriptedLLM

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
PARSERS = {
    "reasoning_parser": "qwen3",
    "tool_call_parser": "qwen3_coder",
    "enable_auto_tool_choice": True,
}


def client_of(**options: Any) -> AppClient:
    return AppClient.over(ScriptedLLM([Part("a", [97], "stop")]), **options)


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"tools": [tool(name="a b")]}, "tools[0].function.name", "pattern"),
        ({"tools": [tool(name="")]}, "tools[0].function.name", "pattern"),
        ({"tools": [tool(name=1)]}, "tools[0].function.name", "string"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "needs tools"),
        (
            {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.type",
            "must be 'function', got 'allowed_tools'",
        ),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.function",
            "is missing",
        ),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "must be 'none', 'auto' or"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "that of tools[0] too"),
        (
            {
                "tools": [
                    tool(strict=True, parameters={"properties": {"a": {"not": {}, "type": "null"}}})
                ]
            },
            "tools[0].function.parameters.properties.a.not",
            "not supported",
        ),
        (
            {"tools": [tool(strict=True, parameters={"minProperties": 1})]},
            "tools[0].function.parameters.minProperties",
            "in a strict function",
        ),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "dictionary"),
        (
            {"tools": [tool(parameters={"type": "array"})]},
            "tools[0].function.parameters",
            "JSON schema of an object",
        ),
        (
            {"tools": [tool(parameters={"properties": []})]},
            "tools[0].function.parameters",
            "JSON schema of an object",
        ),
        ({"tools": [tool(parameters={"x": float("nan")})]}, "tools[0]", "not finite"),
        ({"tools": [tool(description="x" * 70_000)]}, "tools[0]", "65,536 is the limit"),
        ({"tools": [tool(returns={})]}, "tools[0].function.returns", "unknown field"),
        ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [{**tool(), "type": "custom"}]}, "tools[0].type", "'function'"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "'g', which is none of the tools",
        ),
        ({"tool_choice": "auto"}, "tool_choice", 'tool_choice "auto" needs tools'),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice", "needs tools"),
        (
            {"chat_template_kwargs": {"enable_thnking": False}},
            "chat_template_kwargs.enable_thnking",
            "those that it reads: enable_thinking",
        ),
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_is_wrong_with_tools_is_named(body: dict[str, Any], param: str, reason: str) -> None:
    client = client_of(**PARSERS)
    for stream in (False, True):
        response = client.chat(stream=stream, **body)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == param
        assert reason in error["message"]
    assert client.chat(tools=[WEATHER]).status_code == 200


def called(**changes: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


ANSWER = {"role": "tool", "tool_call_id": "1", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([ANSWER], "messages[0].tool_call_id"),
        ([ANSWER, called()], "messages[0].tool_call_id"),
        ([called(), {**ANSWER, "tool_call_id": "2"}], "messages[1].tool_call_id"),
        ([called(), {**ANSWER, "name": "g"}], "messages[1].name"),
        ([called(), {**ANSWER, "content": None}], "messages[1].content"),
        ([called(id=1)], "messages[0].tool_calls[0].id"),
        ([called(type="x")], "messages[0].tool_calls[0].type"),
        ([called(index=0)], "messages[0].tool_calls[0].index"),
        ([called(function={"name": "f"})], "messages[0].tool_calls[0].function.arguments"),
        *(
            (
                [called(function={"name": "f", "arguments": arguments})],
                "messages[0].tool_calls[0].function.arguments",
            )
            for arguments in ({}, None)
        ),
        ([{**called(), "tool_calls": called()["tool_calls"] * 2}], "messages[0].tool_calls[1].id"),
        ([{**called(), "tool_calls": called()["tool_calls"] * 129}], "messages[0].tool_calls"),
        (
            [{**called(), "reasoning": "a", "reasoning_content": "b"}],
            "messages[0].reasoning_content",
        ),
        ([{**called(), "reasoning": 1}], "messages[0].reasoning"),
    ],
    ids=str,
)
def test_what_is_wrong_with_calls_in_messages_is_named(messages: Any, param: str) -> None:
    response = client_of(**PARSERS).post("/v1/chat/completions", {"messages": messages})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize("arguments", ['{"a', "[]", "1", ""])
def test_a_call_that_was_cut_may_be_sent_back(arguments: str) -> None:
    """A chat goes on with what this server has answered at `max_tokens`."""
    messages = [called(function={"name": "f", "arguments": arguments})]
    assert client_of(**PARSERS).post("/v1/chat/completions", {"messages": messages}).is_success


def test_messages_with_calls_need_no_parser() -> None:
    client = client_of()
    empty = called(function={"name": "f", "arguments": ""})
    body = {"messages": [empty, ANSWER, {**called(), "tool_calls": []}]}
    assert client.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    "options", [{}, {"tool_call_parser": "qwen3_coder"}, {"reasoning_parser": "qwen3"}], ids=str
)
def test_tools_need_a_server_that_looks_for_calls(options: dict[str, Any]) -> None:
    client = client_of(**options)
    for choice, param in ((None, "tools"), ("auto", "tool_choice")):
        error = error_of(client.chat(tools=[WEATHER], tool_choice=choice))
        assert error["param"] == param
        assert error["message"] == (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    assert client.chat(tools=[WEATHER], tool_choice="none").status_code == 200


def test_tools_of_tokenize_need_messages() -> None:
    client = client_of(**PARSERS)
    for name, value in (("tools", [WEATHER]), ("chat_template_kwargs", {"enable_thinking": True})):
        error = error_of(client.post("/tokenize", {"prompt": "a", name: value}))
        assert error["param"] == name


@pytest.mark.parametrize(
    ("tag", "options"),
    [
        ("</think>", {"reasoning_parser": "qwen3"}),
        ("</tool_call>", {"tool_call_parser": "qwen3_coder"}),
    ],
)
def test_tags_that_never_show_are_told_at_the_start(
    tag: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """A checkpoint whose tag is a special token, which no text of an output has."""
    tokenizer = json.loads((BUNDLED_MODEL_DIR / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] |= token["content"] == tag
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = bundled_served_model(tokenizer=Tokenizer.from_pretrained(tmp_path))
    assert AppClient.over(ScriptedLLM([]), model)
    with pytest.raises(ConfigError, match=f"{tag} is a special token of this checkpoint"):
        AppClient.over(ScriptedLLM([]), model, **options)
