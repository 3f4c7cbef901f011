"""Thoughts and calls of a chat over HTTP: in one piece and streamed, and what is counted."""

import json
from typing import Any

import pytest

from outrider.entrypoints.server.qwen_markup import THINK_END
from tests.entrypoints.server.app_client import AppClient, bundled_tokenizer, error_of, events
from tests.entrypoints.server.scripted_llm import ScriptedLLM, parts_of_text

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
PARSERS = {
    "reasoning_parser": "qwen3",
    "tool_call_parser": "qwen3_coder",
    "enable_auto_tool_choice": True,
}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
CALLS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
)
TEXT = f"Where? done.\n</think>\n\nI look.\n\n{CALLS}"
MADE = [("get_weather", {"city": "Oslo", "days": 2}), ("get_time", {})]


def spoken(text: str, size: int = 1, finish_reason: str = "stop", **options: Any) -> AppClient:
    llm = ScriptedLLM(parts_of_text(bundled_tokenizer(), text, size, finish_reason))
    return AppClient.over(llm, **{**PARSERS, **options})


def message_of(choice: dict[str, Any]) -> dict[str, Any]:
    """Of the message of a choice what must not depend on how it was sent."""
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning") or "",
        "calls": [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", [])
        ],
        "finish_reason": choice["finish_reason"],
    }


def streamed(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of one choice make up."""
    told: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    ids = set()
    for choice in (one for chunk in chunks for one in chunk["choices"] if one["index"] == index):
        assert told["finish_reason"] is None, "something came after the end"
        told["finish_reason"] = choice["finish_reason"]
        delta = choice["delta"]
        assert sum(bool(delta.get(kind)) for kind in ("content", "reasoning", "tool_calls")) <= 1
        assert delta.get("reasoning") == delta.get("reasoning_content")
        told["content"] += delta.get("content") or ""
        told["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", []):
            function = call["function"]
            if "id" in call:
                assert (call["index"], call["type"]) == (len(told["calls"]), "function")
                ids.add(call["id"])
                told["calls"].append((function["name"], ""))
            name, arguments = told["calls"][call["index"]]
            told["calls"][call["index"]] = (name, arguments + function["arguments"])
    assert len(ids) == len(told["calls"])
    return told


def test_thoughts_text_and_calls_stand_apart() -> None:
    answer = spoken(TEXT).chat(tools=[WEATHER, TIME], **THINKS).json()
    (choice,) = answer["choices"]
    calls = choice["message"].pop("tool_calls")
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "reasoning": "Where? done.",
        "reasoning_content": "Where? done.",
    }
    assert choice["finish_reason"] == "tool_calls"
    assert [set(call) for call in calls] == [{"id", "type", "function"}] * 2
    assert all(call["id"].startswith("call_") for call in calls)
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert made == MADE
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("<tool_call>\n", "")], ids=["whole", "bare"])
def test_streamed_it_is_the_same_whatever_a_step_brings(text: str) -> None:
    num_tokens = len(bundled_tokenizer().encode(text)) + 1
    body = {"tools": [WEATHER, TIME], "stream_options": {"include_usage": True}, **THINKS}
    whole = spoken(text).chat(**{**body, "stream_options": None}).json()
    told = message_of(whole["choices"][0])
    assert told["finish_reason"] == "tool_calls"
    assert [(name, json.loads(arguments)) for name, arguments in told["calls"]] == MADE
    for size in [*range(1, 9), num_tokens // 2, num_tokens - 1, num_tokens]:
        chunks = events(spoken(text, size).chat(stream=True, **body))
        assert streamed(chunks) == told, size
        assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("ended", ["length", "stop"])
def test_thoughts_are_never_more_tokens_than_there_are(ended: str) -> None:
    """Case C12: cut by a limit or by the end-of-sequence token at every token, in steps of 8."""
    tokenizer = bundled_tokenizer()
    text = "<think>\nOne two.\nThree\n</think>\n\nFour"
    token_ids = tokenizer.encode(text)
    marks = [token_ids.index(tokenizer.encode(tag)[0]) for tag in ("<think>", THINK_END)]
    for num_tokens in range(1, len(token_ids) + 1):
        cut = tokenizer.decode(token_ids[:num_tokens])
        client = spoken(cut, 8, ended)
        usage = client.chat(max_tokens=num_tokens).json()["usage"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        assert events(client.chat(**options))[-1]["usage"] == usage
        spent = usage["completion_tokens_details"]["reasoning_tokens"]
        assert usage["completion_tokens"] == num_tokens + (ended == "stop")
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert 0 <= spent <= usage["completion_tokens"]
        # All between the tags, and where they never ended the last token too.
        is_over = num_tokens > marks[1]
        expected = min(num_tokens, marks[1]) - marks[0] - 1
        assert spent == expected + (not is_over and ended == "stop")


def test_all_choices_count() -> None:
    tokenizer = bundled_tokenizer()
    first = parts_of_text(tokenizer, "ab\n</think>c", 3)
    second = parts_of_text(tokenizer, "cd ef", 2, "length", index=1)
    script = [*second[:1], *first, *second[1:]]
    client = AppClient.over(ScriptedLLM(script), **PARSERS)
    answer = client.chat(n=2, **THINKS).json()
    told = [message_of(choice) for choice in answer["choices"]]
    assert [(one["reasoning"], one["content"]) for one in told] == [("ab", "c"), ("cd ef", "")]
    assert answer["choices"][1]["message"]["content"] is None
    num_thought = len(tokenizer.encode("ab\n")) + len(tokenizer.encode("cd ef"))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    chunks = events(client.chat(n=2, stream=True, **THINKS))
    assert [streamed(chunks, index) for index in range(2)] == told


def test_without_parsers_all_is_content() -> None:
    client = AppClient.over(ScriptedLLM(parts_of_text(bundled_tokenizer(), TEXT, 4)))
    answer = client.chat(**THINKS).json()
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": TEXT,
        "refusal": None,
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "completion_tokens_details" not in answer["usage"]


def test_without_tools_or_with_choice_none_nothing_is_called() -> None:
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        client = spoken(f"a</think>{CALLS}")
        choice = client.chat(**body, **THINKS).json()["choices"][0]
        assert choice["message"]["content"] == CALLS
        assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
        assert "get_weather" not in client.api.serving._llm.prompts[0].text  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "is_called"),
    [
        ({}, False),
        ({"strict": True}, True),
        # A text of its own may quote such a tag.
        ({"strict": True, "response_format": {"type": "json_object"}}, False),
    ],
)
def test_in_mid_line_a_call_without_its_tag_is_one_where_a_grammar_makes_it_one(
    options: dict[str, Any], is_called: bool
) -> None:
    strict = {**TIME, "function": {**TIME["function"], "strict": options.pop("strict", None)}}
    client = spoken("I use <function=get_time>\n</function>")
    answer = client.chat(tools=[WEATHER, strict], **options).json()
    assert bool(message_of(answer["choices"][0])["calls"]) == is_called


def test_one_call_alone_where_several_are_not_wanted() -> None:
    body = {"tools": [WEATHER, TIME], "parallel_tool_calls": False}
    whole = message_of(spoken(CALLS).chat(**body).json()["choices"][0])
    assert [name for name, _ in whole["calls"]] == ["get_weather"]
    assert whole["finish_reason"] == "tool_calls"
    for size in (1, 5, 999):
        assert streamed(events(spoken(CALLS, size).chat(stream=True, **body))) == whole


def test_thoughts_can_be_left_out() -> None:
    client = spoken("ab\n</think>\n\nc")
    answer = client.chat(include_reasoning=False, **THINKS).json()
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "c",
        "refusal": None,
    }
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = events(client.chat(include_reasoning=False, stream=True, **THINKS))
    assert not any("reasoning" in one["delta"] for chunk in chunks for one in chunk["choices"])
    error = error_of(AppClient.over(ScriptedLLM([])).chat(include_reasoning=False))
    assert error["param"] == "include_reasoning"


@pytest.mark.parametrize(
    ("body", "text", "reasoning", "content"),
    [
        ({}, "<think>\na\n</think>\n\nb", "a", "b"),
        ({}, "b", "", "b"),
        (THINKS, "a\n</think>\n\nb", "a", "b"),
        (THINKS, "a", "a", None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "b", "", "b"),
        ({"reasoning_effort": "high"}, "a\n</think>\n\nb", "a", "b"),
        ({"reasoning_effort": "none"}, "b", "", "b"),
        ({"reasoning_effort": "none", **THINKS}, "a</think>b", "a", "b"),
    ],
    ids=str,
)
def test_the_prompt_says_whether_the_model_thinks(
    body: dict[str, Any], text: str, reasoning: str, content: str | None
) -> None:
    client = spoken(text)
    message = client.chat(**body).json()["choices"][0]["message"]
    assert (message["reasoning"] or "", message["content"]) == (reasoning, content)
    told = client.api.serving._llm.prompts[0].text  # type: ignore[attr-defined]
    options = (body.get("chat_template_kwargs") or {}).get("enable_thinking")
    if options is None and "reasoning_effort" in body:
        options = body["reasoning_effort"] != "none"
    ends = {None: "assistant\n", True: "<think>\n", False: "<think>\n\n</think>\n\n"}
    assert told.endswith(ends[options])


def test_a_call_that_was_cut_has_no_end() -> None:
    tokenizer = bundled_tokenizer()
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo"
    for finish_reason, stop_reason in (("length", None), ("stop", "zzz")):
        parts = parts_of_text(tokenizer, text, 3, "length")
        last = parts[-1]
        assert last is not None
        last.finish_reason, last.stop_reason = finish_reason, stop_reason
        client = AppClient.over(ScriptedLLM(parts), **PARSERS)
        whole = message_of(client.chat(tools=[WEATHER]).json()["choices"][0])
        assert whole["finish_reason"] == finish_reason
        assert whole["calls"] == [("get_weather", '{"city": "Oslo')]
        assert streamed(events(client.chat(tools=[WEATHER], stream=True))) == whole
    ended = message_of(spoken(text).chat(tools=[WEATHER]).json()["choices"][0])
    assert ended["calls"] == [("get_weather", '{"city": "Oslo"}')]
    assert ended["finish_reason"] == "tool_calls"


def test_tokens_are_told_once_each() -> None:
    body = {"tools": [WEATHER, TIME], "logprobs": True, "return_token_ids": True, **THINKS}
    for size in (1, 7, 999):
        whole = spoken(TEXT, size).chat(**body).json()["choices"][0]
        parts = [
            choice
            for chunk in events(spoken(TEXT, size).chat(stream=True, **body))
            for choice in chunk["choices"]
        ]
        token_ids = [one for part in parts for one in part.get("token_ids", [])]
        assert token_ids == whole["token_ids"]
        content = [one for part in parts for one in (part["logprobs"] or {}).get("content", [])]
        assert content == whole["logprobs"]["content"]
        assert len(content) == len(token_ids)


def test_calls_and_their_answers_are_told_to_the_model() -> None:
    client = spoken(TEXT)
    first = client.chat(tools=[WEATHER, TIME], **THINKS).json()["choices"][0]["message"]
    ids = [call["id"] for call in first["tool_calls"]]
    messages = [
        {"role": "user", "content": "Weather?"},
        first,
        {"role": "tool", "tool_call_id": ids[0], "content": "Rain.", "name": "get_weather"},
        {"role": "tool", "tool_call_id": ids[1], "content": [{"type": "text", "text": "Noon."}]},
    ]
    response = client.post("/v1/chat/completions", {"messages": messages, "tools": [WEATHER]})
    assert response.status_code == 200, response.text
    prompt = client.api.serving._llm.prompts[-1].text  # type: ignore[attr-defined]
    assert prompt.count('"name": "get_weather", "description": "Tells') == 1
    assert "<think>\nWhere? done.\n</think>\n\nI look." in prompt
    told = [prompt.index(word) for word in ("Where?", "I look.", "Oslo", "Rain.", "Noon.")]
    assert told == sorted(told)
    body = {"messages": messages, "tools": [WEATHER, TIME], "model": "tiny", **THINKS}
    ids_told = client.post("/tokenize", body).json()["tokens"]
    assert "get_time" in bundled_tokenizer().decode(ids_told, skip_special_tokens=False)
    assert bundled_tokenizer().decode(ids_told, skip_special_tokens=False).endswith("<think>\n")
