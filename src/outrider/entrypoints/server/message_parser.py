"""From the output of one choice to the message that a client reads: thoughts, text and calls."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outrider.entrypoints.server.logprob_json import TextOffsets
from outrider.entrypoints.server.reasoning_parser import REASONING_PARSERS
from outrider.entrypoints.server.tool_call_parser import TOOL_CALL_PARSERS, CallDelta

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from outrider.outputs import CompletionOutput
    from outrider.tokenizer import Tokenizer


# Characters that are read at once: parsers move text about as they read.
_PIECE = 4096


@dataclass(frozen=True)
class MessageFormat:
    """How the outputs of one request are read.

    Attributes:
        prompt: text in front of them.
        reasoning_parser: name of the parser of thoughts; None leaves them in the content.
        tool_call_parser: name of the parser of calls; None leaves them in the content.
        parameters: JSON schemas of the functions' parameters, by the functions' names.
        max_calls: calls that a message may hold, further ones are left out; None is any number.
        calls_are_held: a grammar makes a call of all that begins as one.
    """

    prompt: str = ""
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_calls: int | None = None
    calls_are_held: bool = False


@dataclass
class MessageDelta:
    """What an output adds to the message.

    Attributes:
        reasoning: goes on what was thought.
        content: goes on what is said.
        calls: parts of calls, one of each call.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class MessageParser:
    """Reads the output of one choice, in whatever pieces it comes.

    Args:
        form: of the request.
        tokenizer: of the checkpoint.
        skip_special_tokens: whether the text of the output is without them.
    """

    def __init__(
        self, form: MessageFormat, tokenizer: Tokenizer, skip_special_tokens: bool
    ) -> None:
        self._max_calls = form.max_calls
        self._reasoning = self._calls = None
        if form.reasoning_parser is not None:
            self._reasoning = REASONING_PARSERS[form.reasoning_parser](
                form.prompt, ends_at_call=form.tool_call_parser is not None
            )
        if form.tool_call_parser is not None:
            self._calls = TOOL_CALL_PARSERS[form.tool_call_parser](
                form.parameters, is_held=form.calls_are_held
            )
        self._offsets = TextOffsets(tokenizer, skip_special_tokens)
        # Where each token begins in the text of the output.
        self._starts: list[int] = []

    def feed(self, output: CompletionOutput) -> MessageDelta:
        """Takes up what the choice has emitted, and at its end what was held back."""
        if self._reasoning is not None and not self._reasoning.is_over:
            self._starts += map(self._offsets.of, output.token_ids)
        text = output.text
        parts = [self._read(text[at : at + _PIECE]) for at in range(0, len(text), _PIECE)]
        if output.finish_reason is not None:
            # A stop string cuts an output as a limit does.
            is_whole = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
            parts += self._finish(is_whole)
        delta = MessageDelta(
            "".join(one.reasoning for one in parts), "".join(one.content for one in parts)
        )
        for call in (call for one in parts for call in one.calls):
            self._add_call(delta.calls, call)
        return delta

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """Why the message ended: for its calls, where the model came to the end of them."""
        calls = self._calls
        if output.finish_reason == "stop" and calls and calls.num_calls and not calls.is_call_open:
            return "tool_calls"
        return output.finish_reason

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thoughts so far, without those of the tags around them."""
        if self._reasoning is None or self._reasoning.start is None:
            return 0
        first = bisect_left(self._starts, self._reasoning.start)
        if self._reasoning.end is None:
            return len(self._starts) - first
        return max(bisect_left(self._starts, self._reasoning.end) - first, 0)

    def _read(self, text: str) -> MessageDelta:
        if self._reasoning is None:
            return self._read_content(text)
        part = self._reasoning.feed(text)
        return replace(self._read_content(part.content), reasoning=part.reasoning)

    def _read_content(self, text: str) -> MessageDelta:
        if self._calls is None:
            return MessageDelta(content=text)
        part = self._calls.feed(text)
        return MessageDelta(content=part.content, calls=part.calls)

    def _finish(self, is_whole: bool) -> Iterator[MessageDelta]:
        if self._reasoning is not None:
            last = self._reasoning.finish()
            yield replace(self._read_content(last.content), reasoning=last.reasoning)
        if self._calls is not None:
            end = self._calls.finish(is_whole)
            yield MessageDelta(content=end.content, calls=end.calls)

    def _add_call(self, calls: list[CallDelta], call: CallDelta) -> None:
        if self._max_calls is not None and call.index >= self._max_calls:
            return
        if calls and calls[-1].index == call.index:
            calls[-1].arguments += call.arguments
        else:
            calls.append(call)
