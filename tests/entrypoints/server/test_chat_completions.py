"""How a chat completion is written, in one piece and as a stream."""

from math import inf
from typing import Any

import pytest

from outrider.logprobs import Logprob
from tests.entrypoints.server.app_client import AppClient, events
from tests.entrypoints.server.scripted_llm import HELLO, Part, ScriptedLLM

TWO: list[Part | None] = [
    Part("x", [10], index=1),
    Part("a", [11, 12]),
    Part("", [14], index=1),
    Part("y", [15], "stop", index=1),
    Part("b", [13], "length"),
]


def test_an_answer_in_one_piece() -> None:
    answer = AppClient.over(ScriptedLLM(HELLO)).chat(user="somebody").json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    num_prompt = answer["usage"]["prompt_tokens"]
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 4,
            "total_tokens": num_prompt + 4,
        },
    }


@pytest.mark.parametrize(
    "body",
    [{}, {"logprobs": True}, {"return_token_ids": True}, {"logprobs": True, "top_logprobs": 2}],
    ids=str,
)
def test_a_stream_adds_up_to_the_answer_in_one_piece(body: dict[str, Any]) -> None:
    client = AppClient.over(ScriptedLLM(TWO))
    answer = client.chat(n=2, **body).json()
    whole = answer["choices"]
    chunks = events(client.chat(n=2, stream=True, **body))
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert prompts == ([answer["prompt_token_ids"]] if "return_token_ids" in body else [])
    assert all(chunk.keys() >= {"prompt_token_ids"} for chunk in chunks[: len(prompts)])
    for choice in whole:
        parts = [p for chunk in chunks for p in chunk["choices"] if p["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        texts = [part["delta"].get("content", "") for part in parts]
        assert "".join(texts) == choice["message"]["content"]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
        if "logprobs" in body:
            content = [one for p in parts for one in (p["logprobs"] or {}).get("content", [])]
            assert content == choice["logprobs"]["content"]
            assert len(content) == 3
        if "return_token_ids" in body:
            token_ids = [one for part in parts for one in part.get("token_ids", [])]
            assert token_ids == choice["token_ids"]


def test_usage_comes_once_in_a_chunk_of_its_own() -> None:
    client = AppClient.over(ScriptedLLM(TWO))
    chunks = events(client.chat(n=2, stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert not any("usage" in chunk for chunk in events(client.chat(n=2, stream=True)))


def test_log_probabilities_of_a_chat() -> None:
    script: list[Part | None] = [
        Part("a", [97, 98], "stop", logprobs=[
            {97: Logprob(-inf, 9, "a"), 5: Logprob(-0.1, 1, "%"), 6: Logprob(-0.2, 2, "&")},
            {98: Logprob(-0.1, 1, "b"), 5: Logprob(-0.1, 1, "%")},
        ]),
    ]  # fmt: skip
    client = AppClient.over(ScriptedLLM(script))
    tokenizer = client.api._model.tokenizer
    choice = client.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["logprob"]) == ("a", -9999.0)
    assert bytes(first["bytes"]) == tokenizer.token_bytes(97)
    # The likeliest, without the chosen one where it is none of them.
    assert [(one["token"], one["logprob"]) for one in first["top_logprobs"]] == [
        ("%", -0.1),
        ("&", -0.2),
    ]
    assert [one["token"] for one in second["top_logprobs"]] == ["b", "%"]
    silent = client.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in silent] == [[], []]


def test_log_probabilities_of_the_prompt_stand_beside_the_choices() -> None:
    llm = ScriptedLLM(HELLO, prompt_logprobs=[None, {98: Logprob(-1.0, 1, "b")}])
    answer = AppClient.over(llm).chat(prompt_logprobs=0, return_token_ids=True).json()
    assert answer["prompt_logprobs"][1]["98"]["logprob"] == -1.0
    assert answer["prompt_token_ids"] == llm.prompts[0].token_ids
