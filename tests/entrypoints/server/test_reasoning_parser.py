"""Thoughts and content of an output, whatever the pieces it comes in. Case C17."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.entrypoints.server.reasoning_parser import Qwen3ReasoningParser
from tests.entrypoints.server.text_cuts import cuts

OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"
ASKED = "<|im_start|>user\nWhat do <think> and </think> say?<|im_end|>\n" + PLAIN
CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"


def parsed(
    prompt: str, pieces: Iterable[str], ends_at_call: bool = False
) -> tuple[str, str, int | None, int | None]:
    parser = Qwen3ReasoningParser(prompt, ends_at_call)
    deltas = [parser.feed(piece) for piece in pieces]
    deltas.append(parser.finish())
    reasoning = "".join(one.reasoning for one in deltas)
    return reasoning, "".join(one.content for one in deltas), parser.start, parser.end


CASES: dict[str, tuple[str, str, str, str]] = {
    "as the template teaches": (OPEN, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    "no line breaks": (OPEN, "Hm.</think>Yes.", "Hm.", "Yes."),
    "a tag of its own": (PLAIN, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    "a tag after space": (PLAIN, "\n <think>Hm.</think>Yes.", "Hm.", "Yes."),
    "the tag twice": (OPEN, "<think>\nHm.\n</think>Yes.", "Hm.", "Yes."),
    "no thoughts": (PLAIN, "Yes.\n<think>no</think>\n", "", "Yes.\n<think>no</think>\n"),
    "space and no thoughts": (PLAIN, "\n\n Yes", "", "\n\n Yes"),
    "space alone": (PLAIN, "\n\n", "", "\n\n"),
    "closed by the prompt": (CLOSED, "\nYes </think> no.", "", "\nYes </think> no."),
    "tags that the user wrote": (ASKED, "They <b>.", "", "They <b>."),
    "thoughts after tags that the user wrote": (ASKED, "<think>Hm.</think>A", "Hm.", "A"),
    "never ended": (OPEN, "Hm.\n\nSo", "Hm.\n\nSo", ""),
    "ended by a line break": (OPEN, "Hm.\n\n", "Hm.\n\n", ""),
    "ended within the tag": (OPEN, "Hm.\n</thi", "Hm.\n</thi", ""),
    "ended before it began": (PLAIN, "<thin", "", "<thin"),
    "nothing thought": (OPEN, "\n\n</think>\n\nYes.", "", "Yes."),
    "nothing said": (OPEN, "Hm.\n</think>", "Hm.", ""),
    "nothing at all": (OPEN, "", "", ""),
    "line breaks within": (OPEN, "\nA\n\n\nB\n\n</think>\nC\n", "A\n\n\nB", "C\n"),
    "tags that are none": (OPEN, "a < b </ think> <</think>x", "a < b </ think> <", "x"),
    "the first end counts": (OPEN, "a</think>b</think>c", "a", "b</think>c"),
    "long space": (PLAIN, "\n" * 99 + "<think>a", "", "\n" * 99 + "<think>a"),
}


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), CASES.values(), ids=CASES)
def test_what_is_thought_and_what_is_said(
    prompt: str, text: str, reasoning: str, content: str
) -> None:
    found = {parsed(prompt, pieces) for pieces in cuts(text)}
    assert len(found) == 1, "the pieces matter"
    assert found.pop()[:2] == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"I call.\n{CALL}", "I call.", CALL),
        (f"I call.\n</think>\n\n{CALL}", "I call.", CALL),
        ("See <tool_call> for that.</think>A", "See <tool_call> for that.", "A"),
        ("<tool_call>\n<function=", "<tool_call>\n<function=", ""),
    ],
)
def test_a_call_ends_thoughts_where_calls_are_looked_for(
    text: str, reasoning: str, content: str
) -> None:
    found = {parsed(OPEN, pieces, ends_at_call=True) for pieces in cuts(text)}
    assert len(found) == 1, "the pieces matter"
    assert found.pop()[:2] == (reasoning, content)
    if "</think>" not in text:
        assert parsed(OPEN, [text])[:2] == (text, "")


def test_it_knows_where_the_thoughts_lie_in_the_output() -> None:
    for text in ("ab\n</think>\n\nc", "\nab</think>c"):
        for pieces in cuts(text):
            assert parsed(OPEN, pieces)[2:] == (0, text.index("</think>"))
    text = " <think>\nab\n</think>c"
    for pieces in cuts(text):
        assert parsed(PLAIN, pieces)[2:] == (8, text.index("</think>"))
    assert parsed(OPEN, ["ab"])[2:] == (0, None)
    assert parsed(PLAIN, ["ab"])[2:] == (None, None)
    assert parsed(CLOSED, ["ab"])[2:] == (None, None)


def test_thoughts_are_told_as_they_come() -> None:
    parser = Qwen3ReasoningParser(OPEN)
    told = [
        parser.feed(piece) for piece in ("I think", " so", "\n", "that <", "b", "</", "think>A")
    ]
    assert [one.reasoning for one in told] == ["I think", " so", "", "\nthat ", "<b", "", ""]
    assert [one.content for one in told] == ["", "", "", "", "", "", "A"]


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "<function=f>", "\n", " ", "<", "a", "</", "é", ">"]
)


@settings(max_examples=150, database=None, deadline=None)
@given(
    st.lists(FRAGMENTS, max_size=12).map("".join),
    st.sampled_from([OPEN, CLOSED, PLAIN]),
    st.booleans(),
    st.data(),
)
def test_the_pieces_never_matter(
    text: str, prompt: str, ends_at_call: bool, data: st.DataObject
) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    whole = parsed(prompt, [text], ends_at_call)
    assert parsed(prompt, pieces, ends_at_call) == whole
    assert parsed(prompt, text, ends_at_call) == whole
