"""/v1/chat/completions: how its choices are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.entrypoints.server.logprob_json import LogprobWriter, of_prompt
from outrider.entrypoints.server.step_json import StepWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.entrypoints.server.protocol import ChatBody
    from outrider.logprobs import LogprobsOfPosition
    from outrider.outputs import CompletionOutput, RequestOutput
    from outrider.tokenizer import Tokenizer


@dataclass
class ChatWriter:
    """Writes the choices of one request, which has one prompt.

    Attributes:
        body: what was asked for.
        tokenizer: of the checkpoint.
    """

    body: ChatBody
    tokenizer: Tokenizer
    object_name: str = "chat.completion"
    chunk_object_name: str = "chat.completion.chunk"
    _steps: StepWriter = field(init=False)

    def __post_init__(self) -> None:
        skips = self.body.skip_special_tokens is not False
        self._steps = StepWriter(self.tokenizer, skips)

    def opening(self) -> Iterator[dict[str, Any]]:
        """Who speaks, for each choice."""
        for index in range(self.body.n or 1):
            yield {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }

    def delta(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that tell of an output."""
        del prompt_index
        for completion in output.outputs:
            choice = self._choice(completion)
            if completion.text:
                choice = {"delta": {"content": completion.text}, **choice}
            elif completion.finish_reason is not None or self._tells_tokens(completion):
                choice = {"delta": {}, **choice}
            else:
                continue
            yield choice

    def whole(
        self,
        prompt_index: int,
        completion: CompletionOutput,
        prompt_logprobs: list[LogprobsOfPosition | None] | None,
    ) -> dict[str, Any]:
        """The choice of a completion that has ended."""
        del prompt_index, prompt_logprobs
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"message": message, **self._choice(completion)}

    def extra(self, output: RequestOutput) -> dict[str, Any]:
        """What is told of the prompt, once for all choices."""
        extra: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            extra["prompt_logprobs"] = of_prompt(output.prompt_logprobs)
        if self.body.return_token_ids:
            extra["prompt_token_ids"] = output.prompt_token_ids
        return extra

    def _tells_tokens(self, completion: CompletionOutput) -> bool:
        asks = self.body.logprobs or self.body.return_token_ids or self.body.return_decode_steps
        return bool(asks and completion.token_ids)

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        """What a choice holds beside its text."""
        choice: dict[str, Any] = {
            "index": completion.index,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
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
