"""An engine that emits what a test wrote down, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.entrypoints.server.engine_client import EngineStats
from outrider.errors import EngineDeadError, RequestError
from outrider.logprobs import Logprob
from outrider.outputs import CompletionOutput, DecodeStep, RequestMetrics, RequestOutput
from outrider.spec_decode.metrics import SpecDecodeMetrics
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from outrider.entrypoints.prompt_encoder import EncodedPrompt
    from outrider.sampling_params import SamplingParams


@dataclass
class Part:
    """What one choice emits in one step."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    index: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    stop_reason: int | str | None = None


@dataclass
class ScriptedLLM:
    """Emits `script` for every prompt.

    Attributes:
        script: parts, in order, each an output of its own; at None it waits until the test puts
            a part there.
        prompt_logprobs: of the prompt.
        prompt_logprobs_at: number of the output that brings them.
        refusal: the error of every request.
        late_refusal: the same, found when the request has been admitted.
        dies_after: parts after which the engine dies; None is never.
        num_cached_tokens: of every prompt; None is an engine that keeps nothing to share.
    """

    script: list[Part | None]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_logprobs_at: int = 0
    refusal: str | None = None
    late_refusal: str | None = None
    dies_after: int | None = None
    num_cached_tokens: int | None = None
    is_running: bool = True
    prompts: list[EncodedPrompt] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    open_ids: set[str] = field(default_factory=set)
    closed_ids: list[str] = field(default_factory=list)
    aborted_ids: set[str] = field(default_factory=set)
    num_aborts: int = 0
    totals: SpecDecodeMetrics = field(default_factory=lambda: SpecDecodeMetrics(3))

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        del params
        if self.refusal is not None:
            raise RequestError(self.refusal)
        if not prompt_token_ids:
            raise RequestError("the prompt is empty")

    async def generate(
        self, prompt: EncodedPrompt, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        assert request_id not in self.open_ids
        self.open_ids.add(request_id)
        self.prompts.append(prompt)
        self.params.append(params)
        drafting = SpecDecodeMetrics(3)
        try:
            if self.late_refusal is not None:
                raise RequestError(self.late_refusal)
            for number in range(len(self.script)):
                if number == self.dies_after:
                    self.is_running = False
                    raise EngineDeadError("dead") from KeyError("why it died")
                while self.script[number] is None and request_id not in self.aborted_ids:
                    await asyncio.sleep(0.001)
                part = self.script[number]
                if request_id in self.aborted_ids:
                    part = Part("", [], "abort")
                assert part is not None
                steps = []
                if part.token_ids:
                    # Of several tokens all but one were drafts.
                    num_accepted = max(part.num_accepted_tokens, len(part.token_ids) - 1)
                    num_drafted = max(part.num_draft_tokens, num_accepted)
                    counts = num_drafted, num_accepted, len(part.token_ids)
                    drafting.observe(*counts)
                    self.totals.observe(*counts)
                    num_kept = min(num_accepted, len(part.token_ids))
                    steps = [DecodeStep(len(part.token_ids), num_drafted, num_kept)]
                if params.logprobs is not None and part.logprobs is None:
                    certain = [{one: Logprob(0.0, 1, f"<{one}>")} for one in part.token_ids]
                    part = replace(part, logprobs=certain)
                await asyncio.sleep(0)
                yield self._output(request_id, prompt, part, steps, drafting, number)
                if part.finish_reason == "abort":
                    return
        finally:
            self.open_ids.discard(request_id)
            self.closed_ids.append(request_id)

    async def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted_ids.update(request_ids)
        self.num_aborts += 1

    def stats(self) -> EngineStats:
        return EngineStats(self.totals, 1, 2, 3, 0.25, 90, 64)

    def _output(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        part: Part,
        steps: list[DecodeStep],
        drafting: SpecDecodeMetrics,
        number: int,
    ) -> RequestOutput:
        copy = SpecDecodeMetrics(3)
        copy.merge(drafting)
        return RequestOutput(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[
                CompletionOutput(
                    part.index,
                    part.text,
                    part.token_ids,
                    part.finish_reason,
                    part.stop_reason,
                    logprobs=part.logprobs,
                    steps=steps,
                )
            ],
            prompt_logprobs=self.prompt_logprobs if number == self.prompt_logprobs_at else None,
            metrics=RequestMetrics(0.0, copy),
            num_cached_tokens=self.num_cached_tokens,
        )


def parts_of_text(
    tokenizer: Tokenizer, text: str, size: int, finish_reason: str = "stop", index: int = 0
) -> list[Part | None]:
    """A text as steps of `size` tokens emit it, with the token that ends it where one does."""
    token_ids = tokenizer.encode(text)
    if finish_reason == "stop":
        token_ids.append(tokenizer.eos_token_ids[0])
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts: list[Part | None] = []
    for at in range(0, len(token_ids), size):
        ids = token_ids[at : at + size]
        is_last = at + size >= len(token_ids)
        told = detokenizer.append(ids) + (detokenizer.flush() if is_last else "")
        parts.append(Part(told, ids, finish_reason if is_last else None, index))
    return parts


# Two tokens of one step, then the end.
HELLO: list[Part | None] = [
    Part("Hel", [10, 11], num_draft_tokens=3, num_accepted_tokens=1),
    Part("lo", [12]),
    Part("!", [13], "stop", num_draft_tokens=2, num_accepted_tokens=1),
]
