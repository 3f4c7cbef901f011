"""Outputs that have to be something: what a body asks for, and what a real engine answers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from outrider.entrypoints.async_llm import AsyncLLM
from outrider.entrypoints.server.chat_protocol import ChatBody
from outrider.entrypoints.server.engine_client import AsyncLLMClient
from outrider.entrypoints.server.message_parser import MessageFormat
from outrider.entrypoints.server.output_grammars import structured_outputs
from outrider.entrypoints.server.run import served_model
from outrider.sampling_params import SamplingParams
from tests.entrypoints.server.app_client import (
    AppClient,
    bundled_tokenizer,
    error_of,
    events,
)
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bonn"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["city"],
}
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}


# Short, for the model is: the template tells of it in the prompt.
PARAMETERS = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def tool_client(model_dir: Path) -> Iterator[AppClient]:
    llm = AsyncLLM(
        model_dir,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        max_model_len=256,
    )
    model = served_model(llm, model_dir)
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen3_coder"}
    yield AppClient.over(AsyncLLMClient(llm), model, enable_auto_tool_choice=True, **parsers)
    llm.shutdown()


def tools(**changes: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS, **changes}}]


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def call_of(message: dict[str, Any]) -> Any:
    """The arguments of the only call of a message, which are valid."""
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "f"
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, PARAMETERS)
    return arguments


@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_a_schema_behind_closed_thoughts(
    real_client: AppClient, num_speculative_tokens: int
) -> None:
    body = {
        "response_format": json_schema(CITY),
        "temperature": 1,
        "seed": 5,
        "n": 4,
        "max_tokens": 100,
        "num_speculative_tokens": num_speculative_tokens,
        **NO_THOUGHTS,
    }
    choices = real_client.chat(**body).json()["choices"]
    finished = [one for one in choices if one["finish_reason"] == "stop"]
    assert finished
    for choice in finished:
        jsonschema.validate(json.loads(choice["message"]["content"]), CITY)


def test_a_text_behind_thoughts(real_client: AppClient) -> None:
    """A model that is made to open thoughts, and to end them soon, says what it has to."""
    answer = real_client.chat(
        structured_outputs={"choice": ["yes", "no"]},
        logit_bias={"3": 10, "4": 10},
        temperature=1,
        seed=3,
        n=6,
        max_tokens=90,
    ).json()
    said = [
        choice["message"]["content"]
        for choice in answer["choices"]
        if choice["finish_reason"] == "stop"
    ]
    assert said
    assert set(said) <= {"yes", "no"}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    "asked", [{"regex": "[0-9]{3}"}, {"grammar": 'root ::= [0-9] [0-9] "7"'}, {"choice": ["127"]}]
)
def test_completions_whole_and_streamed(real_client: AppClient, asked: dict[str, Any]) -> None:
    body = {"structured_outputs": asked, "temperature": 1, "seed": 1, "max_tokens": 20}
    whole = real_client.complete(**body).json()["choices"][0]
    assert (len(whole["text"]), whole["finish_reason"]) == (3, "stop")
    assert whole["text"].isdigit()
    chunks = events(real_client.complete(**body, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("is_strict", [False, True])
def test_required_calls(tool_client: AppClient, choice: Any, is_strict: bool) -> None:
    """Nothing but a call, with the arguments that the function takes."""
    body = {
        "tools": tools(strict=is_strict),
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": 7,
        "n": 3,
        "max_tokens": 60,
        **NO_THOUGHTS,
    }
    for choice_of in tool_client.chat(**body).json()["choices"]:
        assert choice_of["finish_reason"] == "tool_calls"
        assert choice_of["message"]["content"] is None
        call_of(choice_of["message"])


def test_a_call_that_the_model_chose_is_strict(tool_client: AppClient) -> None:
    """The bias makes it begin a call, and everything after that is the grammar's."""
    answer = tool_client.chat(
        tools=tools(strict=True),
        logit_bias={"5": 100},
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
        **NO_THOUGHTS,
    ).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    call_of(choice["message"])


@pytest.mark.parametrize("first", ['"', "<tool_call>"])
def test_a_text_or_a_call(tool_client: AppClient, first: str) -> None:
    (liked,) = bundled_tokenizer().encode(first, add_special_tokens=False)
    answer = tool_client.chat(
        tools=tools(),
        response_format=json_schema({"enum": ["x"]}),
        logit_bias={str(liked): 100},
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
        **NO_THOUGHTS,
    ).json()
    (choice,) = answer["choices"]
    if first != '"':
        call_of(choice["message"])
    else:
        assert (choice["message"]["content"], choice["finish_reason"]) == ('"x"', "stop")


class City(BaseModel):
    """What the official client makes a strict schema of."""

    n: int
    is_big: bool


def test_the_official_client_parses(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        response_format=City,
        max_tokens=60,
        temperature=0,
        extra_body={"logit_bias": {"197": -100}},
    )
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"structured_outputs": {"grammar": "root ::= foo"}}, "structured_outputs", "not defined"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "a group"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "give one of them",
        ),
        (
            {"response_format": json_schema({"type": "array", "uniqueItems": True})},
            "response_format.json_schema.schema.uniqueItems",
            "not supported",
        ),
        (
            {"response_format": json_schema({"type": "integer", "minimum": 2, "maximum": 1})},
            "response_format",
            "minimum greater than maximum",
        ),
    ],
)
def test_what_cannot_be_is_named(
    real_client: AppClient, body: dict[str, Any], param: str, reason: str
) -> None:
    response = real_client.complete(**body, stream=True, max_tokens=5)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
    assert real_client.complete(max_tokens=1).status_code == 200


def test_a_grammar_that_leads_nowhere(real_client: AppClient) -> None:
    body = {"structured_outputs": {"grammar": 'root ::= "a" b\nb ::= b "x"'}, "max_tokens": 5}
    response = real_client.complete(**body)
    assert (response.status_code, error_of(response)["param"]) == (400, "structured_outputs")
    streamed = real_client.complete(**body, stream=True)
    assert "nothing can follow" in streamed.text.rpartition("data: ")[2]


def test_required_calls_need_a_parser() -> None:
    served = AppClient.over(ScriptedLLM(HELLO))
    error = error_of(served.chat(tools=tools(), tool_choice="required"))
    assert error["param"] == "tool_choice"
    assert "--tool-call-parser" in error["message"]


@pytest.mark.parametrize(
    ("prompt", "reasoning"),
    [("x<think>\n", "open"), ("x<think>\n\n</think>\n\n", None), ("x", "optional")],
)
def test_the_prompt_says_whether_thoughts_come_first(prompt: str, reasoning: str | None) -> None:
    body = ChatBody.parse(
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}
    )
    form = MessageFormat(prompt, reasoning_parser="qwen3")
    wanted = asyncio.run(structured_outputs(body, form))
    assert wanted is not None
    assert wanted.reasoning == reasoning
    without = asyncio.run(structured_outputs(body, MessageFormat(prompt)))
    assert without is not None
    assert without.reasoning is None


def test_nothing_asked_is_no_grammar() -> None:
    llm = ScriptedLLM(HELLO)
    client = AppClient.over(llm)
    client.complete(response_format={"type": "text"})
    client.complete()
    assert [params.structured_outputs for params in llm.params] == [None, None]
    assert SamplingParams().structured_outputs is None
