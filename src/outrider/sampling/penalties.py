"""The processor that weakens what prompt and output hold already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.sampling.processed_rows import ProcessedRows, TextSoFar
    from outrider.sampling_params import SamplingParams

_MAX_REPETITION = 1e30
"""A logit of up to 1e8 times so much is finite in float32, and no law tells more from it."""


@dataclass(frozen=True)
class Penalties:
    """Repetition, frequency and presence penalty.

    Attributes:
        is_in_prompt: [P, V] bool.
        num_in_output: [P, V] int32, how often the output holds each id.
        repetition: [P, 1] float64; 1 is off.
        frequency: [P, 1] float64.
        presence: [P, 1] float64.
    """

    is_in_prompt: Tensor
    num_in_output: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def of(
        cls,
        texts: Sequence[TextSoFar],
        vocab_size: int,
        device: torch.device,
    ) -> Penalties | None:
        """The penalties of P texts, None where they have none.

        Args:
            texts: P of them.
            vocab_size: V.
            device: of the tensors.
        """
        params = [text.params for text in texts]
        if not any(map(has_penalty, params)):
            return None
        is_in_prompt = torch.zeros(len(texts), vocab_size, dtype=torch.bool, device=device)
        num_in_output = is_in_prompt.int()
        for place, text in enumerate(texts):
            if params[place].repetition_penalty != 1:
                prompt = torch.tensor(text.distinct_prompt_ids, device=device)
                is_in_prompt[place, prompt] = True
            ids = torch.tensor(text.output_token_ids, dtype=torch.int64, device=device)
            ones = torch.ones_like(ids, dtype=torch.int32)
            num_in_output[place].scatter_add_(0, ids, ones)
        columns = (
            torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(-1)
            for values in (
                [p.repetition_penalty for p in params],
                [p.frequency_penalty for p in params],
                [p.presence_penalty for p in params],
            )
        )
        return cls(is_in_prompt, num_in_output, *columns)

    def apply(self, scores: Tensor, rows: ProcessedRows) -> Tensor:
        """Divides or multiplies what prompt or output hold, then subtracts for what output holds.

        Every token counts once, a draft in the rows after its own.
        """
        counts = self.num_in_output[rows.place]
        drafts = rows.draft_ids[rows.place]
        depths = torch.arange(drafts.shape[1], device=drafts.device)
        is_said = (depths < rows.depth.unsqueeze(-1)) & (drafts >= 0)
        counts.scatter_add_(-1, drafts.clamp(min=0), is_said.int())
        is_present = counts > 0

        repetition, frequency, presence = (
            column[rows.place].to(scores.dtype)
            for column in (
                self.repetition.clamp(1 / _MAX_REPETITION, _MAX_REPETITION),
                self.frequency,
                self.presence,
            )
        )
        weakened = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = weakened.where(is_present | self.is_in_prompt[rows.place], scores)
        return scores.sub_(frequency * counts).sub_(presence * is_present)


def has_penalty(params: SamplingParams) -> bool:
    """Whether they weaken what was said."""
    return bool(
        params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    )
