"""Thoughts and calls through the official client of OpenAI, unchanged."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from outrider.config import ServerConfig
from tests.entrypoints.server.app_client import AppClient, bundled_served_model, bundled_tokenizer
from tests.entrypoints.server.app_client import events as events_of
from tests.entrypoints.server.running_server import running_server
from tests.entrypoints.server.scripted_llm import ScriptedLLM, parts_of_text

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time"}},
]
TEXT = (
    "Where?\n</think>\n\nI look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    'Oslo, "N"\n'
    "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
)
MADE = [("get_weather", {"city": 'Oslo, "N"', "days": 2}), ("get_time", {})]
THINKS: Any = {"chat_template_kwargs": {"enable_thinking": True}}


@contextmanager
def spoken(text: str, size: int) -> Iterator[tuple[openai.OpenAI, ScriptedLLM]]:
    """A client of a server whose model says this, some tokens a step."""
    llm = ScriptedLLM(parts_of_text(bundled_tokenizer(), text, size))
    config = ServerConfig(
        port=0,
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
        enable_auto_tool_choice=True,
    )
    with (
        running_server(llm, bundled_served_model(max_model_len=512), config) as running,
        openai.OpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client,
    ):
        yield client, llm


@pytest.mark.parametrize("size", [1, 4, 999])
def test_a_turn_with_calls_and_the_next(size: int) -> None:
    messages: Any = [{"role": "user", "content": "Weather?"}]
    with spoken(TEXT, size) as (client, llm):
        create = client.chat.completions.create
        choice = create(model="tiny", messages=messages, tools=TOOLS, extra_body=THINKS).choices[0]
        assert choice.finish_reason == "tool_calls"
        message = choice.message
        assert (message.content, message.reasoning) == ("I look.", "Where?")  # type: ignore[attr-defined]
        assert message.tool_calls is not None
        calls: Any = message.tool_calls
        made = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        assert made == MADE
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "Fine."} for call in calls]
        create(model="tiny", messages=[*messages, message, *answers], tools=TOOLS)
        told = llm.prompts[-1].text
        assert told is not None
        assert told.count("Fine.") == 2
        assert told.index("Where?") < told.index("I look.") < told.index('Oslo, "N"')


@pytest.mark.parametrize("size", [1, 2, 3, 7, 999])
def test_the_clients_own_helper_puts_a_stream_together(size: int) -> None:
    messages: Any = [{"role": "user", "content": "Weather?"}]
    with (
        spoken(TEXT, size) as (client, _),
        client.chat.completions.stream(
            model="tiny",
            messages=messages,
            tools=TOOLS,
            stream_options={"include_usage": True},
            extra_body=THINKS,
        ) as stream,
    ):
        thought = ""
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                thought += getattr(event.chunk.choices[0].delta, "reasoning_content", "") or ""
        final: Any = stream.get_final_completion()
    choice = final.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert thought == "Where?"
    made = [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls
    ]
    assert made == MADE
    assert all(call.id.startswith("call_") for call in choice.message.tool_calls)
    spent = final.usage.completion_tokens_details.reasoning_tokens
    assert spent == len(bundled_tokenizer().encode("Where?\n"))


def test_errors_name_the_field() -> None:
    messages: Any = [{"role": "user", "content": "Weather?"}]
    with spoken("a", 1) as (client, _):
        twice: Any = TOOLS * 2
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="tiny", messages=messages, tools=twice, stream=True
            )
        assert caught.value.param == "tools[2].function.name"


@pytest.mark.parametrize("bias", [{}, {"4": 100}, {"4": 14, "3": 10}], ids=str)
def test_thoughts_of_a_real_model_are_counted(real_client: AppClient, bias: dict[str, int]) -> None:
    """Case C12 with drafts: the end of the thoughts, id 4, may fall anywhere within a step."""
    for max_tokens in (1, 2, 3, 5, 9):
        body = {
            "max_tokens": max_tokens,
            "seed": max_tokens,
            "ignore_eos": True,
            "logit_bias": bias,
            "return_token_ids": True,
            "tools": TOOLS[1:],
            **THINKS,
        }
        # Each has a cache of its own, so that the usage is the same.
        answer = real_client.chat(**body, cache_salt=f"{bias} {max_tokens} whole").json()
        assert "usage" in answer, answer
        usage, choice = answer["usage"], answer["choices"][0]
        spent = usage["completion_tokens_details"]["reasoning_tokens"]
        token_ids = choice["token_ids"]
        assert usage["completion_tokens"] == len(token_ids) == max_tokens
        assert spent <= max_tokens
        if 3 not in token_ids:
            assert spent == (token_ids.index(4) if 4 in token_ids else max_tokens)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        salt = {"cache_salt": f"{bias} {max_tokens} streamed"}
        chunks = events_of(real_client.chat(**body, **options, **salt))
        assert chunks[-1]["usage"] == usage
        told = [one["delta"] for chunk in chunks for one in chunk["choices"]]
        for kind in ("reasoning", "content"):
            text = "".join(delta.get(kind) or "" for delta in told)
            assert text == (choice["message"][kind] or "")
