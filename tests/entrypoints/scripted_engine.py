"""An engine whose steps are written down beforehand."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.outputs import StepOutput
from outrider.sampling_params import SamplingParams
from outrider.stop_checker import FinishReason
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer


def emit(
    index: int,
    token_ids: list[int],
    reason: FinishReason | None = None,
    *,
    drafts: int = 0,
    accepted: int = 0,
    stop_reason: int | None = None,
    **others: Any,
) -> StepOutput:
    """A step's output for the engine request that was added as the one of that index."""
    return StepOutput(
        str(index),
        token_ids,
        "",
        drafts,
        accepted,
        finish_reason=reason,
        stop_reason=stop_reason,
        **others,
    )


class ScriptedEngine:
    """Plays back steps; a prompt [9] is refused.

    Args:
        tokenizer: of its texts.
        steps: what each step emits, with the place at which a request was added as its id; an
            exception is raised.

    Attributes:
        added: ids of the requests, in their order.
        choices: the parameters and the choice index of each.
        salts: the cache salt of each.
        aborted: ids, in the order in which they were aborted.
    """

    def __init__(self, tokenizer: Tokenizer, steps: list[list[StepOutput] | BaseException]) -> None:
        self.config = SimpleNamespace(num_speculative_tokens=3, dtype="float32")
        self.tokenizer = tokenizer
        self.scheduler = SimpleNamespace(has_prompt_rows=False)
        self.steps = list(steps)
        self.added: list[str] = []
        self.choices: list[tuple[SamplingParams, int]] = []
        self.salts: list[str | None] = []
        self.aborted: list[str] = []
        self._detokenizers: dict[str, IncrementalDetokenizer] = {}

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if prompt_token_ids == [9]:
            raise RequestError("refused")

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        choice_index: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self.salts.append(cache_salt)
        self.check_request(prompt_token_ids, params)
        self.added.append(request_id)
        self.choices.append((params, choice_index))
        self._detokenizers[request_id] = IncrementalDetokenizer(self.tokenizer)

    def flush_text(self, request_id: str) -> str:
        detokenizer = self._detokenizers.get(request_id)
        return "" if detokenizer is None else detokenizer.flush()

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def step(self) -> list[StepOutput]:
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        return [self._with_text(output) for output in step]

    def _with_text(self, output: StepOutput) -> StepOutput:
        name = self.added[int(output.request_id)]
        shown = output.new_token_ids[:-1] if output.finish_reason == "stop" else None
        text = self._detokenizers[name].append(output.new_token_ids if shown is None else shown)
        if output.finish_reason is not None:
            text += self._detokenizers[name].flush()
        return replace(output, request_id=name, new_text=text)


class TableEngine:
    """Answers each prompt at once, by a function of the prompt's first id and the parameters."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        answer: Callable[[int, SamplingParams], list[int]],
        *,
        dtype: str = "float32",
        margin: float = 1.0,
    ) -> None:
        self.config = SimpleNamespace(num_speculative_tokens=8, dtype=dtype)
        self.tokenizer = tokenizer
        self.scheduler = SimpleNamespace(has_prompt_rows=False)
        self.margin = margin
        self.asked: list[tuple[list[int], int, SamplingParams]] = []
        self._answer = answer
        self._pending: dict[str, list[int]] = {}

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        pass

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        choice_index: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self._pending[request_id] = self._answer(prompt_token_ids[0], params)

    def flush_text(self, request_id: str) -> str:
        return ""

    def abort_request(self, request_id: str) -> None:
        del self._pending[request_id]

    def step(self) -> list[StepOutput]:
        outputs = [
            StepOutput(name, ids, self.tokenizer.decode(ids), 4, 3, finish_reason="length")
            for name, ids in self._pending.items()
        ]
        self._pending.clear()
        return outputs

    def margins(
        self, token_ids: list[int], num_prompt_tokens: int, params: SamplingParams
    ) -> Tensor:
        self.asked.append((token_ids, num_prompt_tokens, params))
        return torch.tensor([1.0, self.margin, *[2.0] * (len(token_ids) - 2)])[: len(token_ids)]
