"""What a body asks for reaches the engine: every field, and the defaults of what is left open."""

from pathlib import Path
from typing import Any

import pytest

from outrider.entrypoints.chat_renderer import ChatRenderer
from outrider.entrypoints.server.chat_protocol import ChatBody
from outrider.entrypoints.server.protocol import CompletionBody
from outrider.sampling_params import RequestOutputKind, SamplingParams
from outrider.structured_outputs import StructuredOutputsParams
from tests.entrypoints.server.app_client import AppClient, bundled_served_model, error_of
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM

# Field of a body, its value, and what it is for the engine where that differs.
SHARED = [
    ("n", 2, 2),
    ("max_tokens", 7, 7),
    ("min_tokens", 3, 3),
    ("temperature", 0.5, 0.5),
    ("temperature", 1, 1.0),
    ("top_p", 0.5, 0.5),
    ("top_k", 5, 5),
    ("top_k", -1, -1),
    ("min_p", 0.25, 0.25),
    ("seed", 7, 7),
    ("seed", -(2**63), -(2**63)),
    ("presence_penalty", 1.5, 1.5),
    ("frequency_penalty", -1.5, -1.5),
    ("repetition_penalty", 1.5, 1.5),
    ("logit_bias", {"7": -100}, {7: -100.0}),
    ("stop", "a", ("a",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop_token_ids", [1, 2], (1, 2)),
    ("bad_words", ["a"], ("a",)),
    ("include_stop_str_in_output", True, True),
    ("ignore_eos", True, True),
    ("skip_special_tokens", False, False),
    ("prompt_logprobs", 2, 2),
    ("num_speculative_tokens", 1, 1),
    ("num_speculative_tokens", 0, 0),
    ("rejection_sample_method", "coupled", "coupled"),
    ("structured_outputs", {"regex": "a+"}, StructuredOutputsParams(regex="a+")),
    (
        "structured_outputs",
        {"json": {"type": "null"}, "disable_any_whitespace": True},
        StructuredOutputsParams(json={"type": "null"}, disable_any_whitespace=True),
    ),
]
# Fields that the server itself honours, or that change nothing.
NOT_FOR_THE_ENGINE = {
    "best_of",
    "cache_salt",
    "chat_template_kwargs",
    "echo",
    "include_reasoning",
    "logprobs",
    "max_completion_tokens",
    "messages",
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt",
    "prompt_cache_key",
    "reasoning_effort",
    # Asks for structured_outputs in other words.
    "response_format",
    "return_decode_steps",
    "return_spec_decode_stats",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "safety_identifier",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "tool_choice",
    "tools",
    "top_logprobs",
    "user",
}


def params_of(path: str, model: Any = None, **body: Any) -> SamplingParams:
    llm = ScriptedLLM(HELLO)
    client = AppClient.over(llm, model)
    response = client.complete(**body) if path == "completions" else client.chat(**body)
    assert response.status_code == 200, response.text
    return llm.params[0]


@pytest.mark.parametrize("path", ["completions", "chat"])
@pytest.mark.parametrize(("name", "value", "expected"), SHARED)
def test_each_field_reaches_the_engine(path: str, name: str, value: Any, expected: Any) -> None:
    params = params_of(path, **{name: value})
    assert getattr(params, name) == expected
    others = {field for field, _, _ in SHARED} - {name, "max_tokens"}
    for other in others:
        assert getattr(params, other) == getattr(SamplingParams(), other), other


def test_no_field_is_forgotten() -> None:
    fields = {*CompletionBody.model_fields, *ChatBody.model_fields}
    assert fields == {name for name, _, _ in SHARED} | NOT_FOR_THE_ENGINE


def test_outputs_are_asked_for_as_they_come() -> None:
    assert params_of("completions").output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("path", "body", "max_tokens"),
    [
        ("completions", {}, 16),
        ("completions", {"max_tokens": None}, 16),
        ("completions", {"max_tokens": 0, "echo": True}, 1),
        ("chat", {}, None),
        ("chat", {"max_tokens": 5}, 5),
        ("chat", {"max_completion_tokens": 6}, 6),
        ("chat", {"max_completion_tokens": 6, "max_tokens": 6}, 6),
    ],
)
def test_the_length_of_the_output(path: str, body: dict[str, Any], max_tokens: int | None) -> None:
    assert params_of(path, **body).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("completions", {}, (None, None)),
        ("completions", {"logprobs": 0}, (0, None)),
        ("completions", {"logprobs": 3}, (3, None)),
        ("completions", {"logprobs": 3, "echo": True}, (3, 3)),
        ("completions", {"logprobs": 3, "echo": True, "prompt_logprobs": 5}, (3, 5)),
        ("completions", {"logprobs": 3, "echo": True, "max_tokens": 0}, (None, 3)),
        ("chat", {"logprobs": False}, (None, None)),
        ("chat", {"logprobs": True}, (0, None)),
        ("chat", {"logprobs": True, "top_logprobs": 4}, (4, None)),
    ],
)
def test_log_probabilities(path: str, body: dict[str, Any], expected: tuple[Any, Any]) -> None:
    params = params_of(path, **body)
    assert (params.logprobs, params.prompt_logprobs) == expected


def test_what_is_left_open_comes_from_the_checkpoint() -> None:
    model = bundled_served_model(
        default_params=SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=99),
        max_new_tokens=99,
    )
    for path in ("completions", "chat"):
        params = params_of(path, model, top_k=5, temperature=None)
        assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 0.95)
        assert params.max_tokens == 99
        assert params_of(path, model, max_tokens=120).max_tokens == 120


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("a b", [[97, 98]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6]], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", "b", "a"], [[1], [2], [1]]),
    ],
)
def test_prompts_of_every_form_reach_the_engine(prompt: Any, token_ids: list[list[int]]) -> None:
    llm = ScriptedLLM(HELLO)
    client = AppClient.over(llm)
    assert client.complete(prompt=prompt).status_code == 200
    texts = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(texts[0], str):
        token_ids = [bundled_served_model().tokenizer.encode(text) for text in texts]
    assert sorted(one.token_ids for one in llm.prompts) == sorted(token_ids)


def test_a_chat_is_written_as_the_checkpoint_does() -> None:
    llm = ScriptedLLM(HELLO)
    client = AppClient.over(llm)
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}]
    assert client.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    text = bundled_served_model().tokenizer.decode(llm.prompts[0].token_ids, False)
    assert text == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    told = client.post("/tokenize", {"messages": messages}).json()
    assert told["tokens"] == llm.prompts[0].token_ids


def test_without_a_chat_template_a_chat_is_refused_without_a_path(tmp_path: Path) -> None:
    renderer = ChatRenderer(bundled_served_model().tokenizer, tmp_path)
    model = bundled_served_model(chat_renderer=renderer, model_dir=tmp_path)
    client = AppClient.over(ScriptedLLM(HELLO), model)
    response = client.chat()
    assert (response.status_code, error_of(response)["param"]) == (400, "messages")
    assert "the checkpoint has no chat template" in response.text
    assert str(tmp_path) not in response.text
    assert client.complete().status_code == 200
