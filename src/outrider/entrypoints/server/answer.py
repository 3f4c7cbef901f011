"""An answer, in one piece or as a stream: what both APIs have in common."""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from outrider.entrypoints.server.errors import ApiError, json_bytes, server_fault
from outrider.outputs import CompletionOutput
from outrider.spec_decode.metrics import SpecDecodeMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from outrider.entrypoints.server.protocol import GenerationBody
    from outrider.entrypoints.server.serving import Generation
    from outrider.logprobs import LogprobsOfPosition
    from outrider.outputs import RequestOutput

logger = logging.getLogger(__name__)

_END = b"data: [DONE]\n\n"


class ChoiceWriter(Protocol):
    """Writes the choices of one API."""

    object_name: str
    chunk_object_name: str

    def opening(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Choices of the chunks before any token, and what stands beside each."""
        ...

    def delta(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that tell of an output; none where there is nothing to tell."""
        ...

    def whole(
        self,
        prompt_index: int,
        completion: CompletionOutput,
        prompt_logprobs: list[LogprobsOfPosition | None] | None,
    ) -> dict[str, Any]:
        """The choice of a completion that has ended."""
        ...

    def extra(self, output: RequestOutput) -> dict[str, Any]:
        """What stands beside the choices of a whole answer."""
        ...

    def usage_details(self) -> dict[str, Any]:
        """What stands in the usage beside the sums, once all choices are written."""
        ...


@dataclass
class Sums:
    """What an answer amounts to.

    Attributes:
        num_prompt_tokens: of all prompts, each once.
        shows_output: whether what was emitted is shown, and so counted.
        num_completion_tokens: of all choices.
        num_cached_tokens: of each prompt, those that did not have to run; none where the engine
            keeps nothing to share.
        drafting: of each prompt, the last figures.
        finish_reasons: of the choices that have ended.
    """

    num_prompt_tokens: int
    shows_output: bool = True
    num_completion_tokens: int = 0
    num_cached_tokens: dict[int, int] = field(default_factory=dict)
    drafting: dict[int, SpecDecodeMetrics] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Counts an output."""
        if self.shows_output:
            self.num_completion_tokens += sum(len(one.token_ids) for one in output.outputs)
        self.finish_reasons += [one.finish_reason for one in output.outputs if one.finish_reason]
        if output.num_cached_tokens is not None:
            self.num_cached_tokens[prompt_index] = output.num_cached_tokens
        if output.metrics is not None:
            self.drafting[prompt_index] = output.metrics.spec_decode

    def usage(self) -> dict[str, Any]:
        """The object `usage`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }
        if self.num_cached_tokens:
            cached = sum(self.num_cached_tokens.values())
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def log_fields(self, num_completions: int, end_reason: str | None) -> dict[str, Any]:
        """What the log says of the request.

        Args:
            num_completions: that it asked for.
            end_reason: of those that have not ended by themselves; None where it was refused.
        """
        num_missing = num_completions - len(self.finish_reasons)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "finish_reasons": self.finish_reasons
            + ([] if end_reason is None else [end_reason] * num_missing),
        }

    def spec_decode_stats(self) -> dict[str, Any]:
        """What drafting brought to the whole request."""
        total = SpecDecodeMetrics()
        for metrics in self.drafting.values():
            total.merge(metrics)
        return dict(total.to_dict())


@dataclass
class Answer:
    """Turns the outputs of a request into what is sent.

    Attributes:
        writer: of the API.
        body: what was asked for.
        answer_id: unique.
        model: as clients call it.
        sums: of the request, which this fills.
    """

    writer: ChoiceWriter
    body: GenerationBody
    answer_id: str
    model: str
    sums: Sums
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""
        parts: dict[tuple[int, int], _Parts] = {}
        last: dict[int, RequestOutput] = {}
        prompt_logprobs: dict[int, list[LogprobsOfPosition | None]] = {}
        async with aclosing(generation):
            async for index, output in generation:
                self.sums.add(index, output)
                last[index] = output
                if output.prompt_logprobs is not None:
                    prompt_logprobs[index] = output.prompt_logprobs
                for completion in output.outputs:
                    parts.setdefault((index, completion.index), _Parts()).add(completion)
        extra: dict[str, Any] = {}
        for index in sorted(last):
            whole = replace(last[index], prompt_logprobs=prompt_logprobs.get(index))
            extra |= self.writer.extra(whole)
        if self.body.return_spec_decode_stats:
            extra["spec_decode_stats"] = self.sums.spec_decode_stats()
        choices = [
            self.writer.whole(index, parts[index, number].joined(), prompt_logprobs.get(index))
            for index, number in sorted(parts)
        ]
        return {
            **self._envelope(self.writer.object_name, choices),
            "usage": self._usage(),
            **extra,
        }

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events; an error in their midst is one of them."""
        try:
            async with aclosing(generation):
                for choice, beside in self.writer.opening():
                    yield self._event([choice], beside)
                async for index, output in generation:
                    self.sums.add(index, output)
                    for choice in self.writer.delta(index, output):
                        yield self._event([choice])
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("request %s failed", self.answer_id)
                error = server_fault()
            # Without the line that ends a sound stream.
            yield b"data: " + json_bytes(error.body()) + b"\n\n"
            return
        last: dict[str, Any] = {}
        if self.body.includes_usage:
            last["usage"] = self._usage()
        if self.body.return_spec_decode_stats:
            last["spec_decode_stats"] = self.sums.spec_decode_stats()
        if last:
            yield self._event([], last)
        yield _END

    def _usage(self) -> dict[str, Any]:
        return {**self.sums.usage(), **self.writer.usage_details()}

    def _event(self, choices: list[dict[str, Any]], beside: dict[str, Any] | None = None) -> bytes:
        chunk = self._envelope(self.writer.chunk_object_name, choices)
        if self.body.includes_usage:
            chunk["usage"] = None
        return b"data: " + json_bytes({**chunk, **(beside or {})}) + b"\n\n"

    def _envelope(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass
class _Parts:
    """Pieces of one completion."""

    parts: list[CompletionOutput] = field(default_factory=list)

    def add(self, part: CompletionOutput) -> None:
        self.parts.append(part)

    def joined(self) -> CompletionOutput:
        last = self.parts[-1]
        has_logprobs = any(part.logprobs is not None for part in self.parts)
        return CompletionOutput(
            index=last.index,
            text="".join(part.text for part in self.parts),
            token_ids=[token_id for part in self.parts for token_id in part.token_ids],
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=[one for part in self.parts for one in part.logprobs or ()]
            if has_logprobs
            else None,
            steps=[step for part in self.parts for step in part.steps],
        )
