"""What a body may not hold: each field by its name, before anything runs."""

from typing import Any

import pytest

from outrider.entrypoints.server import limits
from outrider.entrypoints.server.chat_protocol import ChatBody, ChatMessage, TokenizeBody
from outrider.entrypoints.server.protocol import CompletionBody, GenerationBody
from tests.entrypoints.server.app_client import AppClient, bundled_served_model, error_of
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM
from tests.piece_tokenizer import tokenizer_with_bos

INF, NAN = float("inf"), float("nan")
# For every field of a number: what is none.
NO_NUMBERS = (True, "1", [], {}, NAN, INF, -INF)
WRONG: dict[str, tuple[Any, ...]] = {
    "model": (1, ["tiny"], "x" * 513),
    "n": (0, -1, 1.0, 65, 2**63, *NO_NUMBERS),
    "max_tokens": (-1, 1.5, 2**63, *NO_NUMBERS),
    "min_tokens": (-1, 1.5, 2**63, *NO_NUMBERS),
    "temperature": (-0.1, *NO_NUMBERS),
    "top_p": (0, -0.1, 1.1, *NO_NUMBERS),
    "top_k": (-2, 1.5, 2**63, *NO_NUMBERS),
    "min_p": (-0.1, 1.1, *NO_NUMBERS),
    "seed": (2**63, -(2**63) - 1, 1.5, *NO_NUMBERS),
    "presence_penalty": (-2.1, 2.1, *NO_NUMBERS),
    "frequency_penalty": (-2.1, 2.1, *NO_NUMBERS),
    "repetition_penalty": (0, -1, *NO_NUMBERS),
    "logit_bias": (1, [], {"x": 1}, {"-1": 1}, {"1": 101}, {"1": NAN}, {"1": None}, {"1": True}),
    "stop": (1, [1], [""], "", ["a"] * 33, ["a" * 257], {}),
    "stop_token_ids": ([-1], [2**63], [1.0], [True], "1", 1, [1] * 257),
    "bad_words": ([1], [""], "a", ["a"] * 129, ["a" * 257]),
    "include_stop_str_in_output": (1, "true", []),
    "ignore_eos": (1, "true", []),
    "skip_special_tokens": (0, "true", []),
    "prompt_logprobs": (-1, 21, 1.0, True, "1", 2**63),
    "num_speculative_tokens": (-1, 9, 1.0, True, "1", 2**63),
    "rejection_sample_method": ("greedy", 1, True, []),
    "cache_salt": (1, "", [], True, "x" * 513),
    "stream": (1, "true", []),
    "stream_options": (1, [], {"include_usage": 1}, {"x": True}, {"include_obfuscation": True}),
    "return_token_ids": (1, "true"),
    "return_tokens_as_token_ids": (1, "true"),
    "return_spec_decode_stats": (1, "true"),
    "return_decode_steps": (1, "true"),
    "user": (1, [], "x" * 513),
    "safety_identifier": (1,),
    "prompt_cache_key": (1,),
    "service_tier": ("flex", 1),
    "store": (True, 0, "false"),
    "metadata": (1, {"a": 1}, {"a": "x" * 513}, {str(i): "" for i in range(17)}),
    "response_format": (
        1,
        "json_object",
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "any"}}},
        {"type": "json_object", "schema": {}},
    ),
    "structured_outputs": (
        1,
        [],
        {},
        {"regex": ""},
        {"regex": "a", "choice": ["b"]},
        {"regex": "x" * 70_000},
        {"choice": []},
        {"choice": [""]},
        {"choice": ["a"] * 1025},
        {"json": "{"},
        {"json": {"type": "string", "minLength": NAN}},
        {"json_object": 1},
        {"grammar": 5},
        {"structural_tag": {}},
        {"whitespace_pattern": "a"},
        {"regex": "a", "disable_any_whitespace": True},
    ),
}
WRONG_OF_COMPLETION: dict[str, tuple[Any, ...]] = {
    "prompt": (
        None, 1, True, {}, [], [[]], [[], [1]], ["a", 1], [1, "a"], [[1], "a"], [True], [1.0],
        [[1.0]], ["a"] * 257, [[[1]]], [None], "",
    ),
    "echo": (1, "true"),
    "logprobs": (-1, 21, 1.0, True, "1", 2**63),
    "best_of": (0, 2, True, 1.0, "1"),
    "suffix": ("x", 1),
}  # fmt: skip
WRONG_OF_CHAT: dict[str, tuple[Any, ...]] = {
    "messages": (None, [], "hi", {}, [{"role": "user", "content": "a"}] * 1025),
    "max_completion_tokens": (0, -1, 1.5, True, "1", 2**63),
    "logprobs": (1, 0, "true"),
    "top_logprobs": (-1, 21, 1.0, True, "1"),
    "tools": (1, {}, [1], [{}], [{"type": "function"}], [{"type": "custom"}], "auto"),
    "tool_choice": (1, "any", {}, {"type": "function"}, "auto", [], True),
    "parallel_tool_calls": (1, "true", []),
    "include_reasoning": (0, "false", [], False),
    "reasoning_effort": ("much", 1, True, []),
    "chat_template_kwargs": (
        1,
        [],
        "x",
        {"thinks": True},
        {"tools": []},
        {"messages": []},
        {"eos_token": "x"},
        {"enable_thinking": NAN},
        {str(i): 1 for i in range(17)},
        {"chat_template": "x"},
    ),
}


def client() -> AppClient:
    return AppClient.over(ScriptedLLM(HELLO))


def refused(response: Any) -> tuple[int, str]:
    param = error_of(response)["param"]
    return response.status_code, param.partition("[")[0].partition(".")[0]


@pytest.mark.parametrize(
    ("name", "values"), {**WRONG, **WRONG_OF_COMPLETION}.items(), ids=lambda one: str(one)[:20]
)
def test_wrong_values_of_a_completion_are_named(name: str, values: tuple[Any, ...]) -> None:
    served = client()
    body = {"prompt": "a", **({"stream": True} if name == "stream_options" else {})}
    for value in values:
        response = served.post("/v1/completions", {**body, name: value})
        assert refused(response) == (400, name), value
    assert served.complete().status_code == 200


@pytest.mark.parametrize(
    ("name", "values"), {**WRONG, **WRONG_OF_CHAT}.items(), ids=lambda one: str(one)[:20]
)
def test_wrong_values_of_a_chat_are_named(name: str, values: tuple[Any, ...]) -> None:
    served = client()
    body = {"logprobs": True} if name == "top_logprobs" else {}
    body |= {"stream": True} if name == "stream_options" else {}
    for value in values:
        assert refused(served.chat(**{**body, name: value})) == (400, name), value
    assert served.chat().status_code == 200


def test_every_field_of_a_body_is_tried_with_wrong_values() -> None:
    assert {*WRONG, *WRONG_OF_COMPLETION} - {"suffix"} == set(CompletionBody.model_fields)
    assert {*WRONG, *WRONG_OF_CHAT} == set(ChatBody.model_fields)


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, TokenizeBody])
def test_what_asks_for_nothing_is_no_error_and_all_else_is(body: type[GenerationBody]) -> None:
    path = {
        CompletionBody: "/v1/completions",
        ChatBody: "/v1/chat/completions",
        TokenizeBody: "/tokenize",
    }[body]
    needed: dict[str, Any] = {"prompt": "a"}
    if body is ChatBody:
        needed = {"messages": [{"role": "user", "content": "a"}]}
    served = client()
    for name, neutral in body.UNSUPPORTED.items():
        for value in (None, *neutral):
            assert served.post(path, {**needed, name: value}).status_code == 200, (name, value)
        for value in ({"x": 1}, 7, [7], "7"):
            response = served.post(path, {**needed, name: value})
            assert refused(response) == (400, name), (name, value)
            assert error_of(response)["code"] == "unsupported_parameter"


def test_of_a_true_that_is_neutral_one_is_not() -> None:
    assert refused(client().complete(add_special_tokens=1)) == (400, "add_special_tokens")
    assert refused(client().complete(use_beam_search=0)) == (400, "use_beam_search")


def test_special_tokens_around_a_text() -> None:
    """What a chat's template has written gets nothing put around it, whoever asks for that."""
    served = client()
    messages = [{"role": "user", "content": "a"}]
    assert served.chat(add_special_tokens=False).status_code == 200
    assert refused(served.chat(add_special_tokens=True)) == (400, "add_special_tokens")
    assert refused(served.complete(add_special_tokens=False)) == (400, "add_special_tokens")
    for adds, status in ((False, 200), (True, 400), (None, 200)):
        body = {"messages": messages, "add_special_tokens": adds}
        assert served.post("/tokenize", body).status_code == status
    model = bundled_served_model(tokenizer=tokenizer_with_bos([b"a"]))
    served = AppClient.over(ScriptedLLM(HELLO), model)
    for adds, token_ids in ((False, [0]), (True, [1, 0]), (None, [1, 0])):
        body = {"prompt": "a", "add_special_tokens": adds}
        assert served.post("/tokenize", body).json()["tokens"] == token_ids


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (None, "messages[0]"),
        ("hi", "messages[0]"),
        ({}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "function", "content": "a"}, "messages[0].role"),
        ({"role": "tool", "content": "a"}, "messages[0].tool_call_id"),
        ({"role": "User", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": "a", "x": 1}, "messages[0].x"),
        ({"role": "user", "content": [1]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]},
            "messages[0].content[0].type",
        ),
        *(
            ({"role": "user", "content": "a", name: "x"}, f"messages[0].{name}")
            for name in ChatMessage.UNSUPPORTED
        ),
        ({"role": "user", "content": "a", "name": 1}, "messages[0].name"),
        ({"role": "user", "content": "a", "tool_call_id": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "a", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
        ({"role": "user", "content": "a", "reasoning": "x"}, "messages[0].reasoning"),
        (
            {"role": "user", "content": "a", "reasoning_content": "x"},
            "messages[0].reasoning_content",
        ),
    ],
)
def test_a_wrong_message_is_named(message: Any, param: str) -> None:
    error = error_of(client().post("/v1/chat/completions", {"messages": [message]}))
    assert error["param"] == param


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_whoever_speaks_may_have_a_name(role: str) -> None:
    message = {"role": role, "content": "a", "name": "x"}
    assert client().post("/v1/chat/completions", {"messages": [message]}).is_success


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions"])
def test_ids_in_place_of_tokens_need_logprobs(url: str) -> None:
    prompt = (
        {"prompt": "a"} if "chat" not in url else {"messages": [{"role": "user", "content": "a"}]}
    )
    error = error_of(client().post(url, {**prompt, "return_tokens_as_token_ids": True}))
    assert error["param"] == "return_tokens_as_token_ids"


def test_an_answer_can_be_sent_back_as_a_message() -> None:
    served = client()
    message = served.chat().json()["choices"][0]["message"]
    silent = {"role": "assistant", "content": None, "tool_calls": []}
    again = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    for told in (message, silent):
        body = {"messages": [again, told, again]}
        assert served.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_fields_that_contradict_each_other_are_named(body: dict[str, Any], param: str) -> None:
    assert refused(client().complete(**body)) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ],
)
def test_fields_of_a_chat_that_contradict_each_other_are_named(
    body: dict[str, Any], param: str
) -> None:
    assert refused(client().chat(**body)) == (400, param)


def test_an_unknown_field_is_told_with_the_nearest() -> None:
    error = error_of(client().complete(max_token=3))
    assert error["param"] == "max_token"
    assert error["code"] == "unknown_parameter"
    assert "the nearest is max_tokens" in error["message"]


def test_a_field_that_is_missing_is_told() -> None:
    error = error_of(client().post("/v1/completions", {"model": "tiny"}))
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


def test_a_model_that_is_not_served_is_not_found() -> None:
    for body in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        response = client().post(path, {**body, "model": "gpt"})
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    named = AppClient.over(ScriptedLLM(HELLO), served_model_name=("one", "two"))
    assert [card["id"] for card in named.get("/v1/models").json()["data"]] == ["one", "two"]
    assert named.complete(model="two").json()["model"] == "two"
    assert named.complete().json()["model"] == "one"
    assert named.get("/v1/models/two").json()["id"] == "two"
    assert named.get("/v1/models/three").status_code == 404


def test_more_completions_than_the_server_holds_are_refused() -> None:
    served = AppClient.over(ScriptedLLM(HELLO), max_num_queued=2)
    assert refused(served.complete(n=7)) == (400, "n")
    assert refused(served.complete(prompt=["a"] * 4, n=2)) == (400, "prompt")


def test_limits_are_those_that_the_schema_tells() -> None:
    schema = client().get("/openapi.json").json()
    fields = schema["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["n"]["anyOf"][0]["maximum"] == limits.MAX_N
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/CompletionBody")


@pytest.mark.parametrize("path", ["/page", "/v1", "/v1/embeddings", "/docs", "/redoc"])
def test_what_is_not_there_is_an_error_of_the_same_shape(path: str) -> None:
    response = client().get(path)
    assert (response.status_code, error_of(response)["type"]) == (404, "not_found_error")
    assert client().get("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 4096]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**63]}, "tokens[0]"),
    ],
)
def test_wrong_values_of_the_tokenizer_are_named(path: str, body: Any, param: str) -> None:
    response = client().post(path, body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
