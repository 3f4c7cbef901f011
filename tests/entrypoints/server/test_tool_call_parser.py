"""Calls of functions and content, whatever the pieces they come in. Case C17."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.entrypoints.server.tool_call_parser import Qwen3CoderToolCallParser
from tests.entrypoints.server.text_cuts import cuts

PARAMETERS = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": ["string", "null"]},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
Calls = list[tuple[str, str]]


def parsed(pieces: Iterable[str], is_whole: bool = True) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Content, and the name and arguments of each call."""
    parser = Qwen3CoderToolCallParser(PARAMETERS)
    content, names, arguments = "", [], []
    for delta in (*map(parser.feed, pieces), parser.finish(is_whole)):
        content += delta.content
        assert len({call.index for call in delta.calls}) == len(delta.calls)
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(names)
                names.append(call.name)
                arguments.append("")
            arguments[call.index] += call.arguments
    assert parser.num_calls == len(names)
    return content, tuple(zip(names, arguments, strict=True))


def call(name: str, **values: str) -> str:
    """A call as the template writes it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


CODE = "if a < b and b > c:\n    print('</p>')\n"
TAGS = "Say </parameter> or\n</function> or\n<parameter=x>, then"
QUOTED = f"Write\n{call('write', path='x')}\nand no more."
BARE = call("write", path="a.txt", mode="7")[len("<tool_call>\n") : -len("\n</tool_call>")]
ENDLESS = "<tool_call><function=" + "a" * 200
CASES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "as the template teaches": (
        "I write.\n\n" + call("write", path="a.txt", text="Hi\nyou", mode="420"),
        "I write.",
        [("write", {"path": "a.txt", "text": "Hi\nyou", "mode": 420})],
    ),
    "two calls": (
        call("write", tags='["a", "b"]') + "\n" + call("stop"),
        "",
        [("write", {"tags": ["a", "b"]}), ("stop", {})],
    ),
    "two calls that touch": (call("stop") + call("stop"), "", [("stop", {}), ("stop", {})]),
    "text before, between and behind": (
        f"A\n\n{call('stop')}\nB\n{call('stop')}\n\nC\n",
        "A\n\n\nB\n\n\nC",
        [("stop", {}), ("stop", {})],
    ),
    "text behind alone": (f"\n{call('stop')}\nB", "B", [("stop", {})]),
    "no call": ("\n\nA < b\n\n<tool\n", "\n\nA < b\n\n<tool\n", []),
    "nothing": ("", "", []),
    "a tag that is spoken of": (
        "<tool_call> begins a call, <tool_call>\n<function> too",
        "<tool_call> begins a call, <tool_call>\n<function> too",
        [],
    ),
    "JSON, which this model does not write": (
        '<tool_call>\n{"name": "stop"}\n</tool_call>',
        '<tool_call>\n{"name": "stop"}\n</tool_call>',
        [],
    ),
    "a tag before the tag": ("<tool_call>" + call("stop"), "<tool_call>", [("stop", {})]),
    "a function nobody knows": (
        call("fly", to="5"),
        "",
        [("fly", {"to": "5"})],
    ),
    "a parameter nobody knows": (call("write", size="5"), "", [("write", {"size": "5"})]),
    "no line breaks": (
        "<tool_call><function=write><parameter=path>a b</parameter><parameter=mode>7</parameter>"
        "</function></tool_call>",
        "",
        [("write", {"path": "a b", "mode": 7})],
    ),
    "line breaks of the value": (
        call("write", text="\n\na\n\n", mode="\n7\n"),
        "",
        [("write", {"text": "\n\na\n\n", "mode": 7})],
    ),
    "an empty value": (
        call("write", text="", note="null", mode="") + "\n",
        "",
        [("write", {"text": "", "note": None, "mode": ""})],
    ),
    "an empty value without line breaks": (
        "<tool_call><function=write><parameter=text></parameter></function></tool_call>",
        "",
        [("write", {"text": ""})],
    ),
    "code": (call("write", text=CODE), "", [("write", {"text": CODE})]),
    "what JSON escapes": (
        call("write", text='"\\\t\x01é\u2028😀', mode='"\\'),
        "",
        [("write", {"text": '"\\\t\x01é\u2028😀', "mode": '"\\'})],
    ),
    "a value that speaks of tags": (
        call("write", text=TAGS, path="p"),
        "",
        [("write", {"text": TAGS, "path": "p"})],
    ),
    "a value that speaks of parameters": (
        call("write", path="p", text="\n<parameter=path>\nor <parameter=mode> or\n<parameter=x>"),
        "",
        [
            (
                "write",
                {"path": "p", "text": "\n<parameter=path>\nor <parameter=mode> or\n<parameter=x>"},
            )
        ],
    ),
    "a value that quotes a call": (
        call("write", text=QUOTED, mode="7") + "\n" + call("stop"),
        "",
        [("write", {"text": QUOTED, "mode": 7}), ("stop", {})],
    ),
    "a value that quotes a call in a call": (
        call("write", text=call("write", text=call("stop"))),
        "",
        [("write", {"text": call("write", text=call("stop"))})],
    ),
    "a closing tag that is missing before a parameter": (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n<parameter=text>\nb\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("write", {"path": "a", "text": "b"})],
    ),
    "a closing tag that is missing before the end": (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</function>\n</tool_call>\nB",
        "B",
        [("write", {"path": "a"})],
    ),
    "the end of the function is missing": (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</tool_call>\nB",
        "B",
        [("write", {"path": "a"})],
    ),
    "the end of the call is missing": (
        "<tool_call>\n<function=stop>\n</function>\nB\n" + call("stop"),
        "B",
        [("stop", {}), ("stop", {})],
    ),
    "the beginning of the call is missing": (
        "I write.\n\n" + BARE + "\n</tool_call>\nB",
        "I write.\n\n\nB",
        [("write", {"path": "a.txt", "mode": 7})],
    ),
    "beginnings and ends of calls are missing": (
        BARE + "\n" + BARE + "<function=stop></function>\n \n  <function=stop>\n</function>",
        " \n  ",
        [("write", {"path": "a.txt", "mode": 7})] * 2 + [("stop", {})] * 2,
    ),
    "a bare call behind a whole one": (
        call("stop") + "\n" + BARE,
        "",
        [("stop", {}), ("write", {"path": "a.txt", "mode": 7})],
    ),
    "a bare call without an end": (
        "<function=write>\n<parameter=path>\na b\n</function>",
        "",
        [("write", {"path": "a b"})],
    ),
    "a function that a text speaks of": (
        "A <function=stop> ends it.\n`<function=stop>`",
        "A <function=stop> ends it.\n`<function=stop>`",
        [],
    ),
    "a bare function nobody knows": ("\n<function=fly>\n", "\n<function=fly>\n", []),
    "a bare name that the end cuts": ("<function=sto", "<function=sto", []),
    "all ends are missing": (
        "<tool_call>\n<function=write>\n<parameter=path>\na b\n",
        "",
        [("write", {"path": "a b"})],
    ),
    "the last tag is cut": (
        "<tool_call>\n<function=write>\n<parameter=path>\na b\n</parameter>\n</func",
        "",
        [("write", {"path": "a b"})],
    ),
    "a parameter given twice": (
        "<tool_call><function=write><parameter=mode>1</parameter><parameter=mode>2</parameter>"
        "<parameter=path>a</parameter><parameter=path>b</parameter></function></tool_call>",
        "",
        [("write", {"mode": 1, "path": "a"})],
    ),
    "words before the parameters": (
        "<tool_call>\n<function=write>\nnow <b>\n<parameter=>\n<parameter=path>\na\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("write", {"path": "a"})],
    ),
    "no name": ("<tool_call>\n<function=>\n", "<tool_call>\n<function=>\n", []),
    "a name of two lines": ("<tool_call><function=a\nb>", "<tool_call><function=a\nb>", []),
    "a name without end": (ENDLESS, ENDLESS, []),
    "a name that the end cuts": ("<tool_call>\n<function=st", "<tool_call>\n<function=st", []),
    "space without end": (
        "<tool_call>" + " " * 99 + "<function=stop>",
        "<tool_call>" + " " * 99 + "<function=stop>",
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), CASES.values(), ids=CASES)
def test_what_is_called_and_what_is_said(
    text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    found = {parsed(pieces) for pieces in cuts(text)}
    assert len(found) == 1, "the pieces matter"
    told_content, told_calls = found.pop()
    assert told_content == content
    assert [(name, json.loads(arguments)) for name, arguments in told_calls] == calls
    for name, arguments in told_calls:
        # In the order of the model, each once.
        json.loads(
            arguments, object_pairs_hook=lambda pairs: len(dict(pairs)) == len(pairs) or 1 / 0
        )
        assert name


def test_what_was_cut_is_no_whole_call() -> None:
    """At every place of a call at which a limit may cut it."""
    text = "A\n" + call("write", path="p/q", mode="7", text="x\ny")
    whole = json.loads(parsed([text])[1][0][1])
    begins = text.index("<function=write>") + len("<function=write>")
    ends = text.index("</function>") + len("</function>")
    for at in range(len(text)):
        content, calls = parsed([text[:at]], is_whole=False)
        assert parsed(text[:at], is_whole=False) == (content, calls)
        if at < begins:
            assert (content, calls) == (text[:at], ())
            continue
        ((name, arguments),) = calls
        assert (name, content) == ("write", "A")
        if at >= ends:
            assert json.loads(arguments) == whole
            continue
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)
        assert json.dumps(whole).startswith(arguments)


def test_long_values_are_told_as_they_come_and_others_at_their_end() -> None:
    parser = Qwen3CoderToolCallParser(PARAMETERS)
    pieces = (
        "<tool_call>\n<function=write>\n<parameter=text>\n",
        "one",
        " two\n",
        "three\n",
        "</para",
    )
    told = [parser.feed(piece).calls for piece in pieces]
    assert [one[0].arguments if one else "" for one in told] == [
        '{"text": "', "one", " two", "\\nthree", ""
    ]  # fmt: skip
    assert told[0][0].name == "write"
    pieces = ("meter>\n<parameter=mode>\n4", "20", "\n</parameter>\n", "</function>\n</tool_call>")
    told = [parser.feed(piece).calls for piece in pieces]
    assert [one[0].arguments if one else "" for one in told] == ['", "mode": ', "", "", "420}"]
    assert not parser.is_call_open


def test_content_is_told_as_it_comes() -> None:
    parser = Qwen3CoderToolCallParser({})
    told = [parser.feed(piece).content for piece in ("a", " b\n", "c <", "tool", "s> \n", "d")]
    assert told == ["a", " b", "\nc ", "", "<tools> ", "\nd"]


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<function=write>", "<function=", "</function>",
        "<parameter=path>", "<parameter=mode>", "<parameter=", "</parameter>", "\n", " ", "<", ">",
        "a", "7", "é", '"', "</", call("stop"), call("write", path="p"),
        "<function=stop>", "<function=fly>", BARE, "\n" + BARE,
        "<tool_call>\n<function=write>\n<parameter=text>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ]
)  # fmt: skip


@settings(max_examples=300, database=None, deadline=None)
@given(st.lists(FRAGMENTS, max_size=14).map("".join), st.booleans(), st.data())
def test_the_pieces_never_matter(text: str, is_whole: bool, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    whole = parsed([text], is_whole)
    assert parsed(pieces, is_whole) == whole
    assert parsed(text, is_whole) == whole
    for _, arguments in whole[1] if is_whole else whole[1][:-1]:
        assert isinstance(json.loads(arguments), dict)


def test_time_grows_with_the_text_alone() -> None:
    """What is held back, and looked at with each piece, is short."""
    parser = Qwen3CoderToolCallParser(PARAMETERS)
    text = (
        "<tool_call>\n<function=write>\n<parameter=text>\n" + "\n </parameter> <" * 500 + "\n" * 500
    )
    held = 0
    for char in text:
        parser.feed(char)
        held = max(held, len(parser._text.rest))
    assert held < 256
