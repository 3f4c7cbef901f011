"""/v1/chat/completions: how its choices are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from outrider.entrypoints.server.logprob_json import LogprobWriter, of_prompt
from outrider.entrypoints.server.message_parser import MessageParser
from outrider.entrypoints.server.step_json import StepWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outrider.entrypoints.server.chat_protocol import ChatBody
    from outrider.entrypoints.server.message_parser import MessageDelta, MessageFormat
    from outrider.entrypoints.server.tool_call_parser import CallDelta
    from outrider.logprobs import LogprobsOfPosition
    from outrider.outputs import CompletionOutput, RequestOutput
    from outrider.tokenizer import Tokenizer


@dataclass
class ChatWriter:
    """Writes the choices of one request, which has one prompt.

    Attributes:
        body: what was asked for.
        tokenizer: of the checkpoint.
        form: how outputs are read.
        prompt_token_ids: of the chat.
    """

    body: ChatBody
    tokenizer: Tokenizer
    form: MessageFormat
    prompt_token_ids: list[int]
    object_name: str = "chat.completion"
    chunk_object_name: str = "chat.completion.chunk"
    _parsers: dict[int, MessageParser] = field(default_factory=dict)
    _steps: StepWriter = field(init=False)

    def __post_init__(self) -> None:
        self._steps = StepWriter(self.tokenizer, self.body.skips_special_tokens)

    def opening(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Who speaks, for each choice, and beside the first what is told of the prompt."""
        for index in range(self.body.n or 1):
            choice = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            yield choice, {} if index else self._prompt_details()

    def delta(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that tell of an output.

        Thoughts, text and calls come in chunks of their own: clients look at one of them. The
        first tells of the tokens, the last how the choice ended.
        """
        del prompt_index
        for completion in output.outputs:
            parser = self._parser(completion.index)
            deltas = self._deltas(parser.feed(completion))
            if not deltas:
                if completion.finish_reason is None and not self._tells_tokens(completion):
                    continue
                deltas = [{}]
            choice = self._choice(completion, parser)
            ending = {name: choice.pop(name) for name in ("finish_reason", "stop_reason")}
            not_yet = dict.fromkeys(ending)
            for number, delta in enumerate(deltas):
                if number:
                    choice = {"index": completion.index, "logprobs": None}
                is_last = number == len(deltas) - 1
                yield {"delta": delta, **choice, **(ending if is_last else not_yet)}

    def whole(
        self,
        prompt_index: int,
        completion: CompletionOutput,
        prompt_logprobs: list[LogprobsOfPosition | None] | None,
    ) -> dict[str, Any]:
        """The choice of a completion that has ended."""
        del prompt_index, prompt_logprobs
        parser = self._parser(completion.index)
        said = parser.feed(completion)
        is_silent = not said.content and (said.reasoning or said.calls)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if is_silent else said.content,
            "refusal": None,
        }
        if self._shows_reasoning:
            message |= _reasoning(said.reasoning or None)
        if said.calls:
            message["tool_calls"] = [_call(call) for call in said.calls]
        return {"message": message, **self._choice(completion, parser)}

    def extra(self, output: RequestOutput) -> dict[str, Any]:
        """What is told of the prompt, once for all choices."""
        extra = self._prompt_details()
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            extra["prompt_logprobs"] = of_prompt(output.prompt_logprobs)
        return extra

    def usage_details(self) -> dict[str, Any]:
        """How many tokens of all choices were thoughts, where those are looked for."""
        if self.form.reasoning_parser is None:
            return {}
        count = sum(parser.num_reasoning_tokens for parser in self._parsers.values())
        return {"completion_tokens_details": {"reasoning_tokens": count}}

    def _prompt_details(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_token_ids} if self.body.return_token_ids else {}

    @property
    def _shows_reasoning(self) -> bool:
        is_wanted = self.body.include_reasoning is not False
        return is_wanted and self.form.reasoning_parser is not None

    def _parser(self, index: int) -> MessageParser:
        if index not in self._parsers:
            skips = self.body.skips_special_tokens
            self._parsers[index] = MessageParser(self.form, self.tokenizer, skips)
        return self._parsers[index]

    def _deltas(self, said: MessageDelta) -> Sequence[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if said.reasoning and self._shows_reasoning:
            deltas.append(_reasoning(said.reasoning))
        if said.content:
            deltas.append({"content": said.content})
        if said.calls:
            calls = [{"index": call.index, **_call(call)} for call in said.calls]
            deltas.append({"tool_calls": calls})
        return deltas

    def _tells_tokens(self, completion: CompletionOutput) -> bool:
        asks = self.body.logprobs or self.body.return_token_ids or self.body.return_decode_steps
        return bool(asks and completion.token_ids)

    def _choice(self, completion: CompletionOutput, parser: MessageParser) -> dict[str, Any]:
        """What a choice holds beside its text."""
        choice: dict[str, Any] = {
            "index": completion.index,
            "logprobs": None,
            "finish_reason": parser.finish_reason(completion),
            "stop_reason": completion.stop_reason,
        }
        if self.body.logprobs:
            writer = LogprobWriter(
                self.tokenizer,
                self.body.top_logprobs or 0,
                bool(self.body.return_tokens_as_token_ids),
            )
            content = writer.of_chat(completion.token_ids, completion.logprobs or [])
            choice["logprobs"] = {"content": content, "refusal": None}
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        if self.body.return_decode_steps:
            choice["decode_steps"] = self._steps.of(completion.index, completion)
        return choice


def _reasoning(text: str | None) -> dict[str, Any]:
    """Thoughts under both names: that of vLLM, and the older one that most clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call: CallDelta) -> dict[str, Any]:
    """A call, or a part of one, which has an id where it has a name."""
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"function": function}
    named = {"name": call.name, **function}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": named}
