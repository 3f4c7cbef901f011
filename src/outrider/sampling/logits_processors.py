"""Changes logits by what a request forbids and favours, and by what it has said so far.

The part of `compute_probs` that looks at a request's history. Row j of a window is processed as
plain decoding would process it: its history is the tokens of the request and the drafts before it,
which stay on the device. Requests that use no processor cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.sampling.penalties import Penalties, has_penalty
from outrider.sampling.processed_rows import LogitsProcessor, ProcessedRows, TextSoFar
from outrider.sampling.token_biases import BadWords, LogitBias, MinTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.sampling_params import SamplingParams

_NO_PLACE = -1
"""Of a request that uses no processor."""


@dataclass(frozen=True)
class RowProcessors:
    """What is done to N rows of logits, of which n are concerned.

    Attributes:
        index: [n] int64, which of the N they are, or None where all are.
        rows: the n rows.
        processors: in the order they are applied in.
    """

    index: Tensor | None
    rows: ProcessedRows
    processors: Sequence[LogitsProcessor]

    def apply(self, scores: Tensor) -> Tensor:
        """Returns the new [N, V]; the old one is not changed."""
        changed = scores.clone() if self.index is None else scores[self.index]
        for processor in self.processors:
            changed = processor.apply(changed, self.rows)
        return changed if self.index is None else scores.index_copy(0, self.index, changed)


@dataclass(frozen=True)
class LogitsProcessors:
    """What the requests of a batch do to logits, with what they have said before the window.

    Attributes:
        users: the P of the b requests that use a processor.
        places: of each of the b requests among them, or _NO_PLACE.
        processors: over the P requests, in the order they are applied in.
    """

    users: Sequence[int]
    places: Sequence[int]
    processors: Sequence[LogitsProcessor]

    @classmethod
    def of(
        cls, texts: Sequence[TextSoFar | None], vocab_size: int, device: torch.device
    ) -> LogitsProcessors | None:
        """What the requests ask for, or None where nobody asks for anything.

        Args:
            texts: of b requests, None for one that uses no processor (`uses_processors`).
            vocab_size: V.
            device: of the tensors.
        """
        users = [i for i, text in enumerate(texts) if text is not None]
        if not users:
            return None
        places = [_NO_PLACE] * len(texts)
        for place, i in enumerate(users):
            places[i] = place
        used = [text for text in texts if text is not None]
        processors: list[LogitsProcessor | None] = [
            LogitBias.of(used, device),
            MinTokens.of(used, vocab_size, device),
            BadWords.of(used, device),
            Penalties.of(used, vocab_size, device),
        ]
        return cls(users, places, [processor for processor in processors if processor is not None])

    def rows(
        self, owners: Sequence[int], depths: Sequence[int], draft_ids: Tensor
    ) -> RowProcessors | None:
        """What is done to N rows, or None where none of them is concerned.

        Args:
            owners: N indices of requests.
            depths: N numbers of drafts before the row.
            draft_ids: [b, K] int64, K the largest depth at least; placeholders add no history.
        """
        index = [row for row, owner in enumerate(owners) if self.places[owner] != _NO_PLACE]
        if not index:
            return None
        device = draft_ids.device
        rows = ProcessedRows(
            torch.tensor([self.places[owners[row]] for row in index], device=device),
            torch.tensor([depths[row] for row in index], device=device),
            draft_ids[torch.tensor(self.users, device=device)],
        )
        is_whole = len(index) == len(owners)
        where = None if is_whole else torch.tensor(index, device=device)
        return RowProcessors(where, rows, self.processors)


def process_logits(
    logits: Tensor, allowed_mask: Tensor | None, processors: RowProcessors | None
) -> Tensor:
    """Masks what must not be drawn, then applies the processors; [N, V] to [N, V].

    Returns:
        The logits themselves where there is nothing to do; otherwise a new tensor, of float32 or
        wider if processors ran.
    """
    if allowed_mask is not None:
        logits = logits.masked_fill(~allowed_mask, -torch.inf)
    if processors is None:
        return logits
    return processors.apply(logits.to(torch.promote_types(logits.dtype, torch.float32)))


def uses_processors(
    params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]], num_output_tokens: int
) -> bool:
    """Whether some processor has something to do with a request's next window.

    Args:
        params: of the request.
        bad_words_token_ids: what its bad words are spelled as.
        num_output_tokens: tokens emitted before the window.
    """
    return bool(
        params.logit_bias
        or bad_words_token_ids
        or num_output_tokens < params.min_tokens
        or has_penalty(params)
    )
