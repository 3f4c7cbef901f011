"""An engine whose steps are written down beforehand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.outputs import FinishReason, StepOutput
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer


def emit(
    index: int,
    token_ids: list[int],
    reason: FinishReason | None = None,
    *,
    drafts: int = 0,
    accepted: int = 0,
    stop_reason: int | None = None,
) -> StepOutput:
    """A step's output for the prompt of that index."""
    return StepOutput(str(index), token_ids, drafts, accepted, reason, stop_reason)


class ScriptedEngine:
    """Plays back steps; a prompt [9] is refused.

    Args:
        tokenizer: of its texts.
        steps: what each step emits, with the index of the prompt as the request's id; an exception
            is raised.
    """

    def __init__(self, tokenizer: Tokenizer, steps: list[list[StepOutput] | BaseException]) -> None:
        self.config = SimpleNamespace(num_speculative_tokens=3, dtype="float32")
        self.tokenizer = tokenizer
        self.steps = list(steps)
        self.added: list[str] = []
        self.aborted: list[str] = []

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if prompt_token_ids == [9]:
            raise RequestError("refused")

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: Any) -> None:
        self.added.append(request_id)

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def step(self) -> list[StepOutput]:
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        named = [self.added[int(output.request_id)] for output in step]
        return [
            StepOutput(
                name,
                output.new_token_ids,
                output.num_draft_tokens,
                output.num_accepted_tokens,
                output.finish_reason,
                output.stop_reason,
            )
            for name, output in zip(named, step, strict=True)
        ]


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
        self.margin = margin
        self.asked: list[tuple[list[int], int, SamplingParams]] = []
        self._answer = answer
        self._pending: dict[str, list[int]] = {}

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        pass

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self._pending[request_id] = self._answer(prompt_token_ids[0], params)

    def abort_request(self, request_id: str) -> None:
        del self._pending[request_id]

    def step(self) -> list[StepOutput]:
        outputs = [StepOutput(name, ids, 4, 3, "length") for name, ids in self._pending.items()]
        self._pending.clear()
        return outputs

    def margins(
        self, token_ids: list[int], num_prompt_tokens: int, params: SamplingParams
    ) -> Tensor:
        self.asked.append((token_ids, num_prompt_tokens, params))
        return torch.tensor([1.0, self.margin, *[2.0] * (len(token_ids) - 2)])[: len(token_ids)]
