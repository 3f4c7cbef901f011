"""Splits what a model writes into what it thinks and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.entrypoints.server.growing_text import GrowingText
from outrider.entrypoints.server.qwen_markup import (
    THINK_END,
    THINK_START,
    called_function,
    thoughts_after,
)


@dataclass
class ReasoningDelta:
    """What a piece of output makes certain.

    Attributes:
        reasoning: goes on what was thought.
        content: goes on what is said.
    """

    reasoning: str = ""
    content: str = ""


class Qwen3ReasoningParser:
    """The thoughts of one output, which end at the first `</think>`.

    A prompt that ends with `<think>` has begun them; one that ends with `</think>` has closed them,
    and all is content; after any other the model begins them with a `<think>` of its own, or has
    none. An output that ends before they do has no content. Line breaks next to the two tags belong
    to the format, and to neither side.

    Args:
        prompt: text in front of the output.
        ends_at_call: a call of a function ends thoughts that were not closed.

    Attributes:
        start: characters of output in front of the thoughts; None until there are any.
        end: characters of output up to the end of the thoughts; None until that is known.
    """

    def __init__(self, prompt: str, ends_at_call: bool = False) -> None:
        self.start: int | None = None
        self.end: int | None = None
        self._ends_at_call = ends_at_call
        thoughts = thoughts_after(prompt)
        self._is_open = thoughts == "open"
        self._state: Literal["begin", "reasoning", "gap", "content"] = "begin"
        if thoughts is None:
            self._state = "content"
        self._text = GrowingText()
        self._num_line_breaks = 0
        self._has_reasoning = False
        self._delta = ReasoningDelta()

    @property
    def is_over(self) -> bool:
        """Whether all that comes is content."""
        return self._state in ("gap", "content")

    def feed(self, text: str) -> ReasoningDelta:
        """Takes up the next piece of output."""
        self._delta = ReasoningDelta()
        self._text.read(text, self._step)
        return self._delta

    def finish(self) -> ReasoningDelta:
        """What was held back at the end of the output; call it once, after all else."""
        self._text.is_ended = True
        delta = self.feed("")
        if self._state == "reasoning" and self._has_reasoning:
            delta.reasoning += "\n" * self._num_line_breaks
        return delta

    def _step(self) -> None:
        text = self._text
        if self._state == "begin":
            self._begin()
        elif self._state == "reasoning":
            self._reason(text.take_until_tag())
            if text.rest:
                self._read_tag()
        elif self._state == "gap":
            text.take(len(text.rest) - len(text.rest.lstrip("\n")))
            if text.rest:
                self._state = "content"
        else:
            self._delta.content += text.take(len(text.rest))

    def _begin(self) -> None:
        """Looks whether the model opens its thoughts, also where the prompt has done so."""
        at = self._text.after_space(0)
        if self._text.starts_with(THINK_START, at):
            self._text.take(at + len(THINK_START))
        elif not self._is_open:
            self._state = "content"
            return
        self._state = "reasoning"
        self.start = self._text.num_taken

    def _read_tag(self) -> None:
        """Reads what begins with "<" within the thoughts."""
        if self._text.starts_with(THINK_END):
            self.end = self._text.num_taken
            self._text.take(len(THINK_END))
            self._state = "gap"
        elif self._ends_at_call and called_function(self._text) is not None:
            self.end = self._text.num_taken
            self._state = "content"
        else:
            self._reason(self._text.take(1))

    def _reason(self, text: str) -> None:
        """Adds thoughts; line breaks wait for what follows them."""
        body = text.rstrip("\n")
        if not self._has_reasoning:
            body = body.lstrip("\n")
        if body:
            self._delta.reasoning += "\n" * self._num_line_breaks + body
            self._has_reasoning = True
            self._num_line_breaks = 0
        if self._has_reasoning:
            self._num_line_breaks += len(text) - len(text.rstrip("\n"))


REASONING_PARSERS = {"qwen3": Qwen3ReasoningParser}
