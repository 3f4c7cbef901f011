"""Runs a set of prompts through an engine to their end: the loop around `step`.

Everything that decodes to the end goes through here: the Python API, the command line, the
self-test and the benchmark. So all of them cut text and measure speed alike.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from outrider.entrypoints.output_processor import OutputProcessor
from outrider.errors import RequestError
from outrider.sampling_params import RequestOutputKind
from outrider.spec_decode.metrics import SpecDecodeMetrics, SpecDecodeStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.engine.engine import LLMEngine
    from outrider.entrypoints.prompt_encoder import EncodedPrompt
    from outrider.outputs import RequestOutput
    from outrider.sampling_params import SamplingParams

    OnText = Callable[[int, str], object]

# Ids are unique within the process, so that several runs may share an engine.
_REQUEST_NUMBERS = count()


class DecodeStats(SpecDecodeStats):
    """The figures of a run under the names that the command line prints as JSON."""

    decode_tokens_per_s: float


@dataclass
class DecodeSpeed:
    """Tokens and seconds of the steps that decoded and did nothing else.

    Of a step that ran over some request's prompt as well, or over a piece of it, neither the tokens
    nor the time count.

    Attributes:
        num_tokens: emitted in those steps.
        seconds: that those steps took.
    """

    num_tokens: int = 0
    seconds: float = 0.0

    def observe(self, num_tokens: int, seconds: float, *, has_prompt: bool) -> None:
        """Counts one step."""
        if num_tokens and not has_prompt:
            self.num_tokens += num_tokens
            self.seconds += seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests together; 0 where no step only decoded."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass
class DecodeRun:
    """Prompts that are decoded together.

    Attributes:
        engine: runs them; it may serve other requests before and after, but not at once.
        on_text: called with the index of a prompt and each piece of its text, in order; of several
            completions it is told the first.
        on_finish: called with the index of a prompt when all its completions have ended.
        metrics: what drafting brought in this run.
        speed: how fast it decoded.
    """

    engine: LLMEngine
    on_text: OnText | None = None
    on_finish: Callable[[int], object] | None = None
    metrics: SpecDecodeMetrics = field(init=False)
    speed: DecodeSpeed = field(default_factory=DecodeSpeed, init=False)

    def __post_init__(self) -> None:
        self.metrics = SpecDecodeMetrics(self.engine.config.num_speculative_tokens)
        self._processor = OutputProcessor(self.engine)

    def run(
        self, prompts: Sequence[EncodedPrompt], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Decode every prompt to its end.

        Args:
            prompts: any number.
            params: one for each prompt; every result is whole, whatever their `output_kind`.

        Returns:
            One result for each prompt, in the order of the prompts.

        Raises:
            RequestError: one of the prompts cannot run; nothing has run then.
        """
        for prompt, one in zip(prompts, params, strict=True):
            self._check(prompt, one)
        indexes: dict[str, int] = {}
        results: dict[int, RequestOutput] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                request_id = str(next(_REQUEST_NUMBERS))
                indexes[request_id] = index
                final_only = replace(one, output_kind=RequestOutputKind.FINAL_ONLY)
                self._processor.add_request(request_id, prompt, final_only)
            while len(results) < len(prompts):
                for result in self._step(indexes):
                    index = indexes[result.request_id]
                    results[index] = result
                    if self.on_finish is not None:
                        self.on_finish(index)
        finally:
            # Nothing is left unless an error or a keyboard interrupt came.
            for request_id in self._processor.request_ids:
                self._processor.abort_request(request_id)
        return [results[index] for index in range(len(prompts))]

    def stats(self) -> DecodeStats:
        """The figures that go into the command line's JSON."""
        return {
            **self.metrics.to_dict(),
            "decode_tokens_per_s": self.speed.tokens_per_s,
        }

    def _check(self, prompt: EncodedPrompt, params: SamplingParams) -> None:
        try:
            self.engine.check_request(prompt.token_ids, params)
        except RequestError as error:
            raise RequestError(f"{prompt.name}: {error}" if prompt.name else str(error)) from None

    def _step(self, indexes: dict[str, int]) -> list[RequestOutput]:
        start = time.perf_counter()
        step_outputs = self.engine.step()
        seconds = time.perf_counter() - start
        num_tokens, has_prompt = 0, self.engine.scheduler.has_prompt_rows
        for step_output in step_outputs:
            choice = self._processor.choice(step_output.request_id)
            num_tokens += len(step_output.new_token_ids)
            # A prompt may be a single token.
            has_prompt |= not choice.output.token_ids
            step_output.count(self.metrics)
            if self.on_text is not None and step_output.new_text and choice.output.index == 0:
                self.on_text(indexes[choice.request_id], step_output.new_text)
        self.speed.observe(num_tokens, seconds, has_prompt=has_prompt)
        return self._processor.process(step_outputs)
