"""From what an engine emits in a step to what users get: completions of their requests.

A user's request with `n` completions runs as n requests of the engine, which know nothing of each
other. All share the request's seed and differ in the choice index, which is part of the random key;
without a seed each draws its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.errors import RequestError
from outrider.logprobs import Logprob
from outrider.outputs import CompletionOutput, DecodeStep, RequestMetrics, RequestOutput
from outrider.sampling_params import RequestOutputKind
from outrider.spec_decode.metrics import SpecDecodeMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.engine.engine import LLMEngine
    from outrider.entrypoints.prompt_encoder import EncodedPrompt
    from outrider.logprobs import LogprobsOfPosition, TokenLogprobs
    from outrider.outputs import StepOutput
    from outrider.sampling_params import SamplingParams
    from outrider.tokenizer import Tokenizer


@dataclass(eq=False)
class Choice:
    """One completion on its way, which is one request of the engine.

    Attributes:
        engine_request_id: its id there.
        request_id: of the user's request.
        output: all that has come out of it.
    """

    engine_request_id: str
    request_id: str
    output: CompletionOutput


@dataclass(eq=False)
class _UserRequest:
    """A request of a user on its way."""

    request_id: str
    prompt: EncodedPrompt
    output_kind: RequestOutputKind
    choices: list[Choice]
    metrics: RequestMetrics
    num_unfinished: int
    prompt_logprobs: list[LogprobsOfPosition | None] | None = None
    num_cached_tokens: int | None = None


class OutputProcessor:
    """Keeps users' requests beside the engine that runs them.

    Args:
        engine: runs them; requests that were added to it directly must not emit meanwhile.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._requests: dict[str, _UserRequest] = {}
        self._choices: dict[str, Choice] = {}

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that are not finished, in the order in which they were added."""
        return list(self._requests)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step of the engine has anything to do for them."""
        return bool(self._requests)

    def choice(self, engine_request_id: str) -> Choice:
        """The completion that a request of the engine makes, as long as that is not finished."""
        return self._choices[engine_request_id]

    def add_request(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        arrival_time: float | None = None,
    ) -> None:
        """Queues a request: all of its completions, or none where an error comes.

        Args:
            request_id: unique among those that are not finished.
            prompt: what is continued.
            params: what is asked for.
            arrival_time: seconds of `time.monotonic`; None is now.

        Raises:
            RequestError: it can never run, or the id is in use.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use")
        metrics = RequestMetrics(
            time.monotonic() if arrival_time is None else arrival_time, self._no_drafts()
        )
        choices = [
            Choice(f"{index}-{request_id}", request_id, CompletionOutput(index, "", []))
            for index in range(params.n)
        ]
        self._requests[request_id] = _UserRequest(
            request_id, prompt, params.output_kind, choices, metrics, len(choices)
        )
        try:
            for index, choice in enumerate(choices):
                self._choices[choice.engine_request_id] = choice
                self._engine.add_request(
                    choice.engine_request_id,
                    prompt.token_ids,
                    _params_of(params, index),
                    index,
                    prompt.cache_salt,
                )
        except BaseException:
            self.abort_request(request_id)
            raise

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Drops a request with all its completions.

        Returns:
            Its last output, in which what was not finished has the finish reason "abort"; None
            where the id is unknown or finished.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        aborted = []
        for choice in request.choices:
            if choice.output.finish_reason is None:
                text = self._engine.flush_text(choice.engine_request_id)
                self._engine.abort_request(choice.engine_request_id)
                self._choices.pop(choice.engine_request_id, None)
                choice.output.text += text
                choice.output.finish_reason = "abort"
                aborted.append(
                    replace(choice.output, text=text, token_ids=[], logprobs=None, steps=[])
                )
        request.num_unfinished = 0
        return self._output(request, aborted, time.monotonic())

    def process(self, step_outputs: Iterable[StepOutput]) -> list[RequestOutput]:
        """Takes up what the engine emitted in one step.

        Returns:
            At most one output for each request that emitted something, as its `output_kind` says.
            Nothing in it changes later.
        """
        now = time.monotonic()
        deltas: dict[str, list[CompletionOutput]] = {}
        prompt_logprobs = {}
        for step_output in step_outputs:
            choice = self._choices[step_output.request_id]
            request = self._requests[choice.request_id]
            if step_output.prompt_logprobs is not None:
                found = [self._of_prompt(one) for one in step_output.prompt_logprobs]
                prompt_logprobs[request.request_id] = request.prompt_logprobs = found
            if choice.output.index == 0:
                request.num_cached_tokens = step_output.num_cached_tokens
            self._count(request.metrics, step_output, now)
            delta = self._extend(choice.output, step_output)
            deltas.setdefault(request.request_id, []).append(delta)
            if step_output.finish_reason is not None:
                request.num_unfinished -= 1
                del self._choices[step_output.request_id]
        outputs = []
        for request_id, new in deltas.items():
            output = self._output(
                self._requests[request_id], new, now, prompt_logprobs.get(request_id)
            )
            if output is not None:
                outputs.append(output)
        return outputs

    def _output(
        self,
        request: _UserRequest,
        deltas: list[CompletionOutput],
        now: float,
        new_prompt_logprobs: list[LogprobsOfPosition | None] | None = None,
    ) -> RequestOutput | None:
        """What is told of a request that emitted; one that has ended is forgotten."""
        is_finished = request.num_unfinished == 0
        if is_finished:
            request.metrics.finished_time = now
            del self._requests[request.request_id]
        prompt_logprobs = request.prompt_logprobs
        if request.output_kind == RequestOutputKind.DELTA:
            outputs = sorted(deltas, key=lambda delta: delta.index)
            prompt_logprobs = new_prompt_logprobs
        elif is_finished:
            outputs = [choice.output for choice in request.choices]
        elif request.output_kind == RequestOutputKind.CUMULATIVE:
            outputs = [_copy(choice.output) for choice in request.choices]
        else:
            return None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt.text,
            prompt_token_ids=request.prompt.token_ids,
            outputs=outputs,
            finished=is_finished,
            prompt_logprobs=prompt_logprobs,
            metrics=self._copy_metrics(request.metrics),
            num_cached_tokens=request.num_cached_tokens,
        )

    def _extend(self, output: CompletionOutput, step_output: StepOutput) -> CompletionOutput:
        """Adds what one step emitted to a completion, and returns it alone."""
        text, token_ids = step_output.new_text, step_output.new_token_ids
        output.text += text
        output.token_ids += token_ids
        steps = [
            DecodeStep(
                len(token_ids), step_output.num_draft_tokens, step_output.num_accepted_tokens
            )
        ]
        output.steps += steps
        output.finish_reason = step_output.finish_reason
        output.stop_reason = step_output.stop_reason
        logprobs = None
        if step_output.logprobs is not None:
            logprobs = [_by_token_id(one, self._engine.tokenizer) for one in step_output.logprobs]
            output.logprobs = output.logprobs or []
            output.logprobs += logprobs
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(
                one.logprobs[0] for one in step_output.logprobs
            )
        return replace(output, text=text, token_ids=list(token_ids), logprobs=logprobs, steps=steps)

    def _of_prompt(self, position: TokenLogprobs | None) -> LogprobsOfPosition | None:
        return None if position is None else _by_token_id(position, self._engine.tokenizer)

    def _count(self, metrics: RequestMetrics, step_output: StepOutput, now: float) -> None:
        step_output.count(metrics.spec_decode)
        if metrics.first_token_time is None and step_output.new_token_ids:
            metrics.first_token_time = now

    def _no_drafts(self) -> SpecDecodeMetrics:
        return SpecDecodeMetrics(self._engine.config.num_speculative_tokens)

    def _copy_metrics(self, metrics: RequestMetrics) -> RequestMetrics:
        total = self._no_drafts()
        total.merge(metrics.spec_decode)
        return replace(metrics, spec_decode=total)


def merge_outputs(
    first: RequestOutput, second: RequestOutput, output_kind: RequestOutputKind
) -> RequestOutput:
    """One output in the place of two that nobody has seen yet.

    Args:
        first: of a request.
        second: of the same request, later.
        output_kind: of the request. Only deltas add up; of the others the later says all.
    """
    if output_kind != RequestOutputKind.DELTA:
        return second
    by_index = {output.index: output for output in first.outputs}
    for output in second.outputs:
        before = by_index.get(output.index)
        by_index[output.index] = output if before is None else _join(before, output)
    return replace(
        second,
        outputs=[by_index[index] for index in sorted(by_index)],
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )


def _params_of(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of one completion: the first measures the prompt for all."""
    if index and params.prompt_logprobs is not None:
        return replace(params, prompt_logprobs=None)
    return params


def _copy(output: CompletionOutput) -> CompletionOutput:
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return replace(
        output, token_ids=list(output.token_ids), logprobs=logprobs, steps=list(output.steps)
    )


def _join(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs: list[LogprobsOfPosition] | None = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        steps=first.steps + second.steps,
    )


def _by_token_id(position: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsOfPosition:
    """What users read of one position, the chosen token first."""
    chosen, *likeliest = position.token_ids
    logprobs: Sequence[float] = position.logprobs
    found = {chosen: _logprob(chosen, logprobs[0], position.rank, tokenizer)}
    rank = 0
    for place, token_id in enumerate(likeliest, 1):
        if place == 1 or logprobs[place] < logprobs[place - 1]:
            rank = place
        if token_id != chosen:
            found[token_id] = _logprob(token_id, logprobs[place], rank, tokenizer)
    return found


def _logprob(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer) -> Logprob:
    spelled = tokenizer.token_bytes(token_id, skip_special_tokens=False)
    return Logprob(logprob, rank, spelled.decode(errors="replace"))
