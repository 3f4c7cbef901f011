"""Finds the calls of functions in what a model says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.entrypoints.server.growing_text import GrowingText
from outrider.entrypoints.server.qwen_markup import (
    CALL_END,
    FUNCTION_END,
    PARAMETER_END,
    PARAMETER_START,
    called_function,
    function_at,
)
from outrider.entrypoints.server.tool_arguments import is_text, text_json, to_json, types_of


@dataclass
class CallDelta:
    """A part of a call.

    Attributes:
        index: of the call in its message.
        name: of the function, in the first part.
        arguments: goes on the JSON text of the arguments.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class ToolDelta:
    """What a piece of content makes certain.

    Attributes:
        content: what is no call.
        calls: parts of calls, one of each call.
    """

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class Qwen3CoderToolCallParser:
    """The calls of one message.

    What cannot be a call stays content. A `<tool_call>` may be missing before a function that is
    known: models forget it. Where no grammar holds the output to calls, such a function has to
    begin a line, since a text may speak of one. Line breaks around calls count only between two
    texts. A value ends at a `</parameter>` behind which the function goes on or ends, since a value
    may speak of tags itself; a whole call that is quoted in a value belongs to it. A model that
    leaves the tag out ends its value with the next parameter of the schema, or with the end of the
    call. Of a parameter that is given twice the first counts.

    Args:
        parameters: JSON schemas of the functions' parameters, by the functions' names.
        is_held: a grammar makes a call of every `<function=` in the text (`chosen_calls_format`).

    Attributes:
        num_calls: that have begun.
        is_call_open: the last one has not ended.
    """

    def __init__(
        self, parameters: Mapping[str, Mapping[str, Any]], *, is_held: bool = False
    ) -> None:
        self.num_calls = 0
        self.is_call_open = False
        self._parameters = parameters
        self._is_held = is_held
        self._text = GrowingText()
        self._state: Literal["content", "function", "value", "quoted", "ended"] = "content"
        self._delta = ToolDelta()
        self._num_line_breaks = 0
        self._has_content = False
        # Nothing but white space stands before the next character of content in its line.
        self._is_line_start = True
        self._schema: Mapping[str, Any] = {}
        self._given: set[str] = set()
        self._value: _Value | None = None
        self._num_quoted = 0

    def feed(self, text: str) -> ToolDelta:
        """Takes up the next piece of content."""
        self._delta = ToolDelta()
        self._text.read(text, self._step)
        return self._delta

    def finish(self, is_whole: bool) -> ToolDelta:
        """What was held back at the end of the output; call it once, after all else.

        Args:
            is_whole: the model ended the output itself, and a call without its end is complete.
                Else it was cut: the arguments stay without their end, so that nobody takes them
                for what the model meant.
        """
        if self.is_call_open and not is_whole:
            self._delta = ToolDelta()
            return self._delta
        self._text.is_ended = True
        delta = self.feed("")
        if self.is_call_open:
            self._end_value()
            self._end_call()
        if not self.num_calls:
            delta.content += "\n" * self._num_line_breaks
        return delta

    def _step(self) -> None:
        text = self._text
        if self._state == "ended":
            at = text.after_space(0)
            if text.starts_with(CALL_END, at, or_is_cut=True):
                text.take(at + len(CALL_END))
            self._state = "content"
            return
        if self._value is not None and not self._value.has_begun:
            # The line break behind the tag is not the value's.
            self._value.has_begun = True
            if text.rest.startswith("\n"):
                text.take(1)
            return
        passed = text.take_until_tag()
        if self._state == "content":
            self._say(passed)
        elif self._value is not None:
            self._add(passed)
        if text.rest:
            {
                "content": self._read_content_tag,
                "function": self._read_function_tag,
                "value": self._read_value_tag,
                "quoted": self._read_quoted_tag,
            }[self._state]()

    def _read_content_tag(self) -> None:
        called = called_function(self._text)
        if called is None and (self._is_line_start or self._is_held):
            called = function_at(self._text, 0)
            if called is not None and called[0] not in self._parameters:
                called = None
        if called is None:
            self._say(self._text.take(1))
            return
        name, length = called
        self._text.take(length)
        self._delta.calls.append(CallDelta(self.num_calls, name))
        self.num_calls += 1
        self.is_call_open = True
        self._schema = self._parameters.get(name, {})
        self._given = set()
        self._state = "function"

    def _read_function_tag(self) -> None:
        """Reads a tag between parameters; what else stands there is nothing."""
        text = self._text
        if text.starts_with(PARAMETER_START):
            name = text.name(len(PARAMETER_START))
            text.take(1 if name is None else len(PARAMETER_START) + len(name) + 1)
            if name is not None:
                self._begin_value(name)
        elif text.starts_with(FUNCTION_END):
            text.take(len(FUNCTION_END))
            self._end_call()
        elif text.starts_with(CALL_END):
            self._end_call()
        else:
            text.take(1)

    def _read_value_tag(self) -> None:
        text = self._text
        if self._value_ends():
            self._end_value()
            if text.starts_with(PARAMETER_END):
                text.take(len(PARAMETER_END))
            return
        if called_function(text) is not None:
            self._num_quoted = 1
            self._state = "quoted"
        self._add(text.take(1))

    def _read_quoted_tag(self) -> None:
        text = self._text
        if called_function(text) is not None:
            self._num_quoted += 1
        elif text.starts_with(CALL_END):
            self._num_quoted -= 1
        if not self._num_quoted:
            self._state = "value"
        self._add(text.take(1))

    def _value_ends(self) -> bool:
        """Whether the tag at the front ends the value."""
        text = self._text
        if text.starts_with(PARAMETER_END):
            at = text.after_space(len(PARAMETER_END))
            return any(
                text.starts_with(tag, at, or_is_cut=True)
                for tag in (PARAMETER_START, FUNCTION_END, CALL_END)
            )
        if text.starts_with(FUNCTION_END):
            at = text.after_space(len(FUNCTION_END))
            return text.starts_with(CALL_END, at, or_is_cut=True)
        assert self._value is not None, "a value is being read"
        if self._value.is_at_line_start and text.starts_with(PARAMETER_START):
            name = text.name(len(PARAMETER_START))
            return name in self._properties() and name not in self._given
        return False

    def _begin_value(self, name: str) -> None:
        types = types_of(self._properties().get(name), self._schema)
        self._value = _Value(name, types, is_dropped=name in self._given)
        self._state = "value"
        if not self._value.is_dropped:
            self._emit(("{" if not self._given else ", ") + text_json(name) + ": ")
            if self._value.is_text:
                self._emit('"')
        self._given.add(name)

    def _add(self, text: str) -> None:
        assert self._value is not None, "a value is being read"
        self._emit(self._value.add(text))

    def _end_value(self) -> None:
        if self._value is not None:
            self._emit(self._value.end())
            self._value = None
            self._state = "function"

    def _end_call(self) -> None:
        self._emit("}" if self._given else "{}")
        self.is_call_open = False
        self._is_line_start = True
        self._state = "ended"

    def _properties(self) -> Mapping[str, Any]:
        properties = self._schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _emit(self, arguments: str) -> None:
        """Adds to the arguments of the call that is open."""
        if not arguments:
            return
        index = self.num_calls - 1
        if not self._delta.calls or self._delta.calls[-1].index != index:
            self._delta.calls.append(CallDelta(index))
        self._delta.calls[-1].arguments += arguments

    def _say(self, text: str) -> None:
        """Adds to the content; line breaks wait for what follows them."""
        body = text.strip("\n")
        line = text.rpartition("\n")
        self._is_line_start = not line[2].strip() and (bool(line[1]) or self._is_line_start)
        if not body:
            self._num_line_breaks += len(text)
            return
        num_before = self._num_line_breaks + len(text) - len(text.lstrip("\n"))
        if self.num_calls and not self._has_content:
            num_before = 0
        self._delta.content += "\n" * num_before + body
        self._has_content = True
        self._num_line_breaks = len(text) - len(text.rstrip("\n"))


@dataclass
class _Value:
    """A value of a parameter.

    Attributes:
        name: of the parameter.
        types: that its schema allows.
        is_dropped: nobody asks for it.
        has_begun: the line break behind its tag has been dealt with.
    """

    name: str
    types: tuple[str, ...]
    is_dropped: bool
    has_begun: bool = False
    _parts: list[str] = field(default_factory=list)
    _is_empty: bool = True
    _has_line_break: bool = False

    @property
    def is_text(self) -> bool:
        """Whether it is told as it comes; what else it may be is known at its end."""
        return is_text(self.types)

    @property
    def is_at_line_start(self) -> bool:
        """Whether the next character begins a line."""
        return self._is_empty or self._has_line_break

    def add(self, text: str) -> str:
        """Takes up a part; the last line break waits, since one before the closing tag is not its.

        Returns:
            JSON that is certain now.
        """
        if not text:
            return ""
        self._is_empty = False
        if self._has_line_break:
            text = "\n" + text
        self._has_line_break = text.endswith("\n")
        if self._has_line_break:
            text = text[:-1]
        if self.is_dropped:
            return ""
        if self.is_text:
            return text_json(text)[1:-1]
        self._parts.append(text)
        return ""

    def end(self) -> str:
        """The JSON that is left."""
        if self.is_dropped:
            return ""
        return '"' if self.is_text else to_json("".join(self._parts), self.types)


TOOL_CALL_PARSERS = {"qwen3_coder": Qwen3CoderToolCallParser}
