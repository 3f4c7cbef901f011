"""The passes behind a choice, as clients read them."""

from typing import Any

import pytest

from tests.entrypoints.server.app_client import AppClient, bundled_tokenizer, events
from tests.entrypoints.server.scripted_llm import HELLO, Part, ScriptedLLM


def steps_of(response: Any, is_streamed: bool, index: int = 0) -> list[dict[str, Any]]:
    """The steps of a choice, those of all chunks of a stream."""
    answers = events(response) if is_streamed else [response.json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    return [
        step
        for choice in choices
        if choice["index"] == index
        for step in choice.get("decode_steps", [])
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", ["complete", "chat"])
def test_steps_are_told_when_asked_for(api: str, is_streamed: bool) -> None:
    client = AppClient.over(ScriptedLLM(HELLO))
    response = getattr(client, api)(stream=is_streamed, return_decode_steps=True)
    steps = steps_of(response, is_streamed)
    assert [(step["num_draft_tokens"], step["token_ids"]) for step in steps] == [
        (3, [10, 11]),
        (0, [12]),
        (2, [13]),
    ]
    assert [step["token_sources"] for step in steps] == [
        ["accepted_1", "recovered"],
        ["plain"],
        ["accepted_1"],
    ]
    texts = [bundled_tokenizer().decode([token_id]) for token_id in (10, 11, 12, 13)]
    assert [step["token_texts"] for step in steps] == [texts[:2], texts[2:3], texts[3:]]
    assert "decode_steps" not in getattr(client, api)().text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_steps_tell_adds_up_to_the_figures(is_streamed: bool) -> None:
    script = [*HELLO[:2], Part("x", [14, 15, 16], "length", index=1, num_draft_tokens=3), HELLO[2]]
    client = AppClient.over(ScriptedLLM(script))
    body = {"n": 2, "return_decode_steps": True, "return_spec_decode_stats": True}
    response = client.complete(stream=is_streamed, **body)
    stats = (events(response)[-1] if is_streamed else response.json())["spec_decode_stats"]
    steps = [*steps_of(response, is_streamed), *steps_of(response, is_streamed, 1)]
    accepted = [
        sum(source.startswith("accepted_") for source in step["token_sources"]) for step in steps
    ]
    assert stats["num_drafts"] == sum(step["num_draft_tokens"] > 0 for step in steps) == 3
    assert stats["num_draft_tokens"] == sum(step["num_draft_tokens"] for step in steps) == 8
    assert stats["num_accepted_tokens"] == sum(accepted) == 4
    assert stats["num_accepted_tokens_per_pos"] == [3, 1, 0]
    assert stats["tokens_per_target_pass"] == 7 / len(steps) == 7 / 4


def test_choices_do_not_share_the_rest_of_a_character() -> None:
    first, *others = bundled_tokenizer().encode("🎉")
    assert others, "the character is a single token"
    script: list[Part | None] = [
        Part("", [first]),
        Part("", [first], index=1),
        Part("🎉", others, "length"),
        Part("\ufffd", [10], "length", index=1),
    ]
    client = AppClient.over(ScriptedLLM(script))
    response = client.complete(stream=True, n=2, return_decode_steps=True)
    whole, broken = (
        [text for step in steps_of(response, True, i) for text in step["token_texts"]]
        for i in range(2)
    )
    assert whole == [""] * len(others) + ["🎉"]
    assert broken == ["", f"\ufffd{bundled_tokenizer().decode([10])}"]


def test_a_character_that_is_never_completed_is_told_at_the_end() -> None:
    first, *_ = bundled_tokenizer().encode("🎉")
    client = AppClient.over(ScriptedLLM([Part("a", [10]), Part("\ufffd", [first], "length")]))
    (_, last) = steps_of(client.complete(return_decode_steps=True), False)
    assert last["token_texts"] == ["\ufffd"]


def test_special_tokens_have_a_text_where_they_are_shown() -> None:
    (end,) = bundled_tokenizer().eos_token_ids[:1]
    client = AppClient.over(ScriptedLLM([Part("", [end], "stop")]))
    for skips, text in ((True, ""), (False, bundled_tokenizer().decode([end], False))):
        response = client.complete(return_decode_steps=True, skip_special_tokens=skips)
        assert steps_of(response, False)[0]["token_texts"] == [text]
    assert text


def test_a_prompt_that_is_only_measured_has_no_steps() -> None:
    client = AppClient.over(ScriptedLLM(HELLO[2:]))
    response = client.complete(echo=True, max_tokens=0, return_decode_steps=True)
    assert steps_of(response, False) == []
