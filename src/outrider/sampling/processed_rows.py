"""What logits processors look at, the rows that they change, and what a processor is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from outrider.sampling_params import SamplingParams
    from outrider.structured_outputs import OutputGrammar


@dataclass(frozen=True)
class TextSoFar:
    """What was asked of one text, and what it holds before the window.

    Attributes:
        params: what was asked for.
        distinct_prompt_ids: ids that the prompt holds.
        output_token_ids: what was emitted, in order.
        stop_token_ids: ids that end the output.
        bad_words_token_ids: sequences that the output must not hold, none empty.
        grammar: what the output has to follow, or None.
        num_certain_tokens: those of the output that are never taken back.
    """

    params: SamplingParams
    distinct_prompt_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: Collection[int]
    bad_words_token_ids: Sequence[Sequence[int]]
    grammar: OutputGrammar | None = None
    num_certain_tokens: int = 0


@dataclass(frozen=True)
class ProcessedRows:
    """The n rows that some processor changes.

    Attributes:
        place: [n] int64, of the row's request among the P that use a processor.
        depth: [n] int64, how many drafts come before the row.
        draft_ids: [P, K] int64, drafts of each request; below 0 nothing was drawn.
    """

    place: Tensor
    depth: Tensor
    draft_ids: Tensor


class LogitsProcessor(Protocol):
    """One step on the way from the model's logits to those that are sampled from."""

    def apply(self, scores: Tensor, rows: ProcessedRows) -> Tensor:
        """Returns the new [n, V] of the rows; may write into `scores`, which nobody else holds."""
        ...
