"""How a completion is written, in one piece and as a stream."""

from math import inf
from typing import Any

import pytest

from outrider.logprobs import Logprob
from tests.entrypoints.server.app_client import AppClient, error_of, events
from tests.entrypoints.server.scripted_llm import HELLO, Part, ScriptedLLM

PROMPT = [97, 98, 300]
PROMPT_LOGPROBS: list[dict[int, Logprob] | None] = [
    None,
    {98: Logprob(-inf, 4096, "b"), 5: Logprob(-0.1, 1, "%")},
    {300: Logprob(-0.5, 1, "xy"), 7: Logprob(-2.0, 2, "'")},
]


def position(token_id: int, logprob: float, rank: int, text: str) -> dict[int, Logprob]:
    """A chosen token, and beside it the likeliest, which has the rank 1."""
    return {token_id: Logprob(logprob, rank, text), 4000: Logprob(-0.25, 1, "best")}


def collect(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices by index from the chunks of a stream, in the form of an answer in one piece."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {**part, "text": "", "logprobs": None})
            choice["text"] += part["text"]
            if part["logprobs"] is not None:
                known = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                choice["logprobs"] = {n: known[n] + part["logprobs"][n] for n in known}
            choice["finish_reason"] = part["finish_reason"]
    return choices


def test_an_answer_in_one_piece() -> None:
    llm = ScriptedLLM(HELLO)
    answer = AppClient.over(llm).complete(prompt=PROMPT, model="tiny").json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "Hello!",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_the_deltas_of_a_stream() -> None:
    chunks = events(AppClient.over(ScriptedLLM(HELLO)).complete(stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", "!"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_once_in_a_chunk_of_its_own() -> None:
    chunks = events(
        AppClient.over(ScriptedLLM(HELLO)).complete(
            prompt=[PROMPT, [1]], stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 6
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}


SCRIPTS: dict[str, list[Part | None]] = {
    "hello": HELLO,
    "text held back": [Part("", [10]), Part("ab", [11, 12]), Part("", [13], "length")],
    "two choices": [
        Part("x", [10], index=1),
        Part("a", [11, 12]),
        Part("y", [], "stop", index=1),
        Part("b", [13], "length"),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"echo": True},
        {"logprobs": 1},
        {"logprobs": 1, "echo": True},
        {"logprobs": 0, "return_tokens_as_token_ids": True, "echo": True, "prompt": [PROMPT, [5]]},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
    ],
    ids=str,
)
def test_a_stream_adds_up_to_the_answer_in_one_piece(
    script: list[Part | None], body: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "n": 2 if script is SCRIPTS["two choices"] else 1, **body}
    logprobs = PROMPT_LOGPROBS if body["prompt"] == PROMPT else [None]
    if "logprobs" in body and "echo" in body and body["prompt"] != PROMPT:
        body["prompt"] = [[5], [6]]
    llm = ScriptedLLM(script, prompt_logprobs=logprobs)
    client = AppClient.over(llm)
    whole = client.complete(**body).json()["choices"]
    chunks = events(client.complete(**body, stream=True))
    assert collect(chunks) == {choice["index"]: choice for choice in whole}
    reasons = [part["finish_reason"] for chunk in chunks for part in chunk["choices"]]
    assert sum(reason is not None for reason in reasons) == len(whole)


def test_log_probabilities_of_a_completion() -> None:
    script: list[Part | None] = [
        Part("a", [97], logprobs=[position(97, -1.5, 3, "a")]),
        Part("bc", [98, 99], "stop", logprobs=[
            {98: Logprob(-0.25, 1, "b")}, position(99, -inf, 4096, "c")
        ]),
    ]  # fmt: skip
    logprobs = AppClient.over(ScriptedLLM(script)).complete(logprobs=1).json()["choices"][0]
    assert logprobs["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-1.5, -0.25, -9999.0],
        "top_logprobs": [
            {"a": -1.5, "best": -0.25},
            {"b": -0.25},
            {"c": -9999.0, "best": -0.25},
        ],
        "text_offset": [0, 1, 2],
    }


def test_tokens_of_one_text_do_not_hide_the_chosen_one() -> None:
    script: list[Part | None] = [
        Part("\ufffd", [128], "stop", logprobs=[
            {128: Logprob(-3.0, 2, "\ufffd"), 129: Logprob(-0.1, 1, "\ufffd")}
        ]),
    ]  # fmt: skip
    client = AppClient.over(ScriptedLLM(script))
    found = client.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"\ufffd": -3.0}]
    found = client.complete(logprobs=1, return_tokens_as_token_ids=True).json()
    found = found["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:128"]
    assert found["top_logprobs"] == [{"token_id:128": -3.0, "token_id:129": -0.1}]


def test_echo_with_log_probabilities_of_the_prompt() -> None:
    client = AppClient.over(ScriptedLLM(HELLO, prompt_logprobs=PROMPT_LOGPROBS))
    choice = client.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=0).json()
    assert choice["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    choice = choice["choices"][0]
    prompt = client.post("/detokenize", {"tokens": PROMPT}).json()["prompt"]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [
        None,
        {"b": -9999.0, "%": -0.1},
        # Of the likeliest, one.
        {"xy": -0.5},
    ]
    assert choice["logprobs"]["text_offset"] == [0, len(prompt[:1]), 2]


def test_an_echo_waits_for_the_log_probabilities_of_its_prompt() -> None:
    script = SCRIPTS["two choices"]
    client = AppClient.over(ScriptedLLM(script, PROMPT_LOGPROBS, prompt_logprobs_at=2))
    body = {"prompt": PROMPT, "n": 2, "echo": True, "logprobs": 1}
    whole = client.complete(**body).json()["choices"]
    found = collect(events(client.complete(**body, stream=True)))
    assert found == {choice["index"]: choice for choice in whole}
    for choice in whole:
        assert choice["logprobs"]["token_logprobs"][:3] == [None, -9999.0, -0.5]


def test_an_echo_of_a_text_is_that_text() -> None:
    text = "<|im_start|> é\n"
    choice = AppClient.over(ScriptedLLM(HELLO)).complete(prompt=text, echo=True).json()["choices"]
    assert choice[0]["text"] == f"{text}Hello!"


def test_log_probabilities_of_the_prompt_as_vllm_writes_them() -> None:
    client = AppClient.over(ScriptedLLM(HELLO, prompt_logprobs=PROMPT_LOGPROBS))
    choice = client.complete(prompt=PROMPT, prompt_logprobs=1).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        "98": {"logprob": -9999.0, "rank": 4096, "decoded_token": "b"},
        "5": {"logprob": -0.1, "rank": 1, "decoded_token": "%"},
    }


def test_choices_are_counted_from_prompt_to_prompt() -> None:
    script: list[Part | None] = [Part("a", [1], "stop"), Part("b", [2], "stop", index=1)]
    answer = AppClient.over(ScriptedLLM(script)).complete(prompt=["x", "y"], n=2).json()
    found = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert found == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    assert answer["usage"]["completion_tokens"] == 4


def test_token_ids_are_told_when_asked_for() -> None:
    client = AppClient.over(ScriptedLLM(HELLO))
    choice = client.complete(prompt=PROMPT, return_token_ids=True).json()["choices"][0]
    assert choice["token_ids"] == [10, 11, 12, 13]
    assert choice["prompt_token_ids"] == PROMPT
    chunks = events(client.complete(prompt=PROMPT, return_token_ids=True, stream=True))
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part["token_ids"] for part in parts] == [[10, 11], [12], [13]]
    assert [part["prompt_token_ids"] for part in parts] == [PROMPT, None, None]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_drafting_brought_is_told_when_asked_for(is_streamed: bool) -> None:
    llm = ScriptedLLM(HELLO)
    body = {"prompt": ["a", "b"], "return_spec_decode_stats": True, "stream": is_streamed}
    response = AppClient.over(llm).complete(**body)
    answer = events(response)[-1] if is_streamed else response.json()
    assert answer["spec_decode_stats"] == dict(llm.totals.to_dict())
    assert answer["spec_decode_stats"]["num_accepted_tokens_per_pos"] == [4, 0, 0]
    assert "spec_decode_stats" not in AppClient.over(llm).complete().json()


def test_probabilities_that_are_no_numbers_are_an_error_and_not_a_text() -> None:
    broken: list[Part | None] = [Part("a", [1]), Part("", [], "error")]
    client = AppClient.over(ScriptedLLM(broken))
    response = client.complete()
    assert (response.status_code, "not finite" in error_of(response)["message"]) == (500, True)
    lines = client.complete(stream=True).text.split("\n\n")
    assert '"error"' in lines[1]
    assert "[DONE]" not in lines
