"""/v1/completions: how its choices are written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outrider.entrypoints.server.logprob_json import LogprobWriter, TextOffsets, of_prompt
from outrider.entrypoints.server.step_json import StepWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outrider.entrypoints.prompt_encoder import EncodedPrompt
    from outrider.entrypoints.server.protocol import CompletionBody
    from outrider.logprobs import LogprobsOfPosition
    from outrider.outputs import CompletionOutput, RequestOutput
    from outrider.tokenizer import Tokenizer

    PromptLogprobs = list[LogprobsOfPosition | None]


@dataclass
class CompletionWriter:
    """Writes the choices of one request: those of the first prompt, then of the next.

    Attributes:
        body: what was asked for.
        prompts: of the request.
        tokenizer: of the checkpoint.
    """

    body: CompletionBody
    prompts: Sequence[EncodedPrompt]
    tokenizer: Tokenizer
    object_name: str = "text_completion"
    chunk_object_name: str = "text_completion"
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)
    _steps: StepWriter = field(init=False)
    _held: list[tuple[int, RequestOutput]] = field(default_factory=list)
    _prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._steps = StepWriter(self.tokenizer, self.body.skips_special_tokens)

    def opening(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """None: a completion begins with its text."""
        yield from ()

    def delta(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that tell of an output.

        With echo the prompt comes first, and with its log probabilities, for which what other
        choices emit has to wait.
        """
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        self._held.append((prompt_index, output))
        held, self._held = self._held, []
        for index, one in held:
            if self._echoes_logprobs and index not in self._prompt_logprobs:
                self._held.append((index, one))
                continue
            for completion in one.outputs:
                choice = self._choice(index, completion, self._prompt_logprobs.get(index))
                if choice["text"] or choice["finish_reason"] or self._tells_tokens(completion):
                    yield choice

    def whole(
        self,
        prompt_index: int,
        completion: CompletionOutput,
        prompt_logprobs: PromptLogprobs | None,
    ) -> dict[str, Any]:
        """The choice of a completion that has ended."""
        choice = self._choice(prompt_index, completion, prompt_logprobs)
        if self.body.prompt_logprobs is not None and prompt_logprobs is not None:
            choice["prompt_logprobs"] = of_prompt(prompt_logprobs)
        return choice

    def extra(self, output: RequestOutput) -> dict[str, Any]:
        """Nothing: all stands in the choices."""
        del output
        return {}

    def usage_details(self) -> dict[str, Any]:
        """Nothing: the sums are all."""
        return {}

    @property
    def _echoes_logprobs(self) -> bool:
        return bool(self.body.echo) and self.body.logprobs is not None

    def _tells_tokens(self, completion: CompletionOutput) -> bool:
        asks = self.body.logprobs is not None or self.body.return_token_ids
        asks = asks or self.body.return_decode_steps
        return bool(asks and completion.token_ids)

    def _choice(
        self,
        prompt_index: int,
        completion: CompletionOutput,
        prompt_logprobs: PromptLogprobs | None,
    ) -> dict[str, Any]:
        """A choice that tells of a completion, or of a part of one."""
        body, prompt = self.body, self.prompts[prompt_index]
        if body.max_tokens == 0:
            completion = _without_output(completion)
        index = prompt_index * (body.n or 1) + completion.index
        is_first = index not in self._offsets
        text = ""
        if is_first and body.echo:
            text = self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            text = text if prompt.text is None else prompt.text
        choice: dict[str, Any] = {
            "index": index,
            "text": text + completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if is_first:
            skips = body.skips_special_tokens
            self._offsets[index] = TextOffsets(self.tokenizer, skips, len(text))
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs(
                index, completion, prompt, prompt_logprobs, is_first
            )
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = prompt.token_ids if is_first else None
        if body.return_decode_steps:
            choice["decode_steps"] = self._steps.of(index, completion)
        return choice

    def _logprobs(
        self,
        index: int,
        completion: CompletionOutput,
        prompt: EncodedPrompt,
        prompt_logprobs: PromptLogprobs | None,
        is_first: bool,
    ) -> dict[str, Any]:
        writer = LogprobWriter(
            self.tokenizer, self.body.logprobs or 0, bool(self.body.return_tokens_as_token_ids)
        )
        written = writer.of_completion(
            completion.token_ids, completion.logprobs or [], self._offsets[index]
        )
        if not is_first or not self.body.echo or prompt_logprobs is None:
            return written
        offsets = TextOffsets(self.tokenizer, skip_special_tokens=False)
        of_echo = writer.of_completion(prompt.token_ids, prompt_logprobs, offsets)
        return {name: of_echo[name] + written[name] for name in written}


def _without_output(completion: CompletionOutput) -> CompletionOutput:
    """What is shown of the one token that ran for the sake of its prompt."""
    reason = "length" if completion.finish_reason == "stop" else completion.finish_reason
    return replace(
        completion,
        text="",
        token_ids=[],
        logprobs=None,
        steps=[],
        finish_reason=reason,
        stop_reason=None,
    )
