"""Processors that add a number to the logits of some ids: biases, and minus infinity.

Every table has a row for each of P requests and is padded to the widest of them; what pads changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.sampling.processed_rows import ProcessedRows, TextSoFar

_ANY_TOKEN_ID = -2
"""In the beginning of a bad word: whatever stands there. Neither a token nor a placeholder."""


@dataclass(frozen=True)
class LogitBias:
    """Adds a number to the logits of some ids.

    Attributes:
        token_ids: [P, E] int64.
        biases: [P, E] float64, 0 in padding.
    """

    token_ids: Tensor
    biases: Tensor

    @classmethod
    def of(cls, texts: Sequence[TextSoFar], device: torch.device) -> LogitBias | None:
        """The biases of the texts, None where they have none."""
        biases = [text.params.logit_bias or {} for text in texts]
        if not any(biases):
            return None
        token_ids = _padded([list(bias) for bias in biases], 0, device)
        values = _padded([list(bias.values()) for bias in biases], 0.0, device)
        return cls(token_ids, values)

    def apply(self, scores: Tensor, rows: ProcessedRows) -> Tensor:
        """Adds."""
        biases = self.biases[rows.place].to(scores.dtype)
        return scores.scatter_add_(-1, self.token_ids[rows.place], biases)


@dataclass(frozen=True)
class MinTokens:
    """Excludes what would end the output while it is shorter than `min_tokens`.

    Attributes:
        stop_ids: [P, S] int64.
        penalties: [P, S] float64, -inf, 0 in padding.
        num_missing: [P] int64, tokens that must come before the output may end.
    """

    stop_ids: Tensor
    penalties: Tensor
    num_missing: Tensor

    @classmethod
    def of(
        cls,
        texts: Sequence[TextSoFar],
        vocab_size: int,
        device: torch.device,
    ) -> MinTokens | None:
        """The stops of the texts whose output is still too short, None where none is."""
        missing = [text.params.min_tokens - len(text.output_token_ids) for text in texts]
        if max(missing) <= 0:
            return None
        stops = [[i for i in sorted(t.stop_token_ids) if i < vocab_size] for t in texts]
        penalties = [[-torch.inf] * len(ids) for ids in stops]
        return cls(
            _padded(stops, 0, device),
            _padded(penalties, 0.0, device),
            torch.tensor(missing, device=device),
        )

    def apply(self, scores: Tensor, rows: ProcessedRows) -> Tensor:
        """Adds minus infinity to the stops of rows that come too early."""
        is_early = (rows.depth < self.num_missing[rows.place]).unsqueeze(-1)
        penalties = self.penalties[rows.place].to(scores.dtype).where(is_early, 0)
        return scores.scatter_add_(-1, self.stop_ids[rows.place], penalties)


@dataclass(frozen=True)
class BadWords:
    """Excludes the last token of a word where the tokens before it are the word's beginning.

    The prompt does not count: a word that begins in it may be finished.

    Attributes:
        beginnings: [P, W, M] int64, all tokens of each word but the last; shorter ones are filled
            up in front with _ANY_TOKEN_ID.
        last_ids: [P, W] int64.
        penalties: [P, W] float64, -inf, 0 in padding.
        tails: [P, M] int64, the last tokens of each output, -1 where there are fewer.
    """

    beginnings: Tensor
    last_ids: Tensor
    penalties: Tensor
    tails: Tensor

    @classmethod
    def of(cls, texts: Sequence[TextSoFar], device: torch.device) -> BadWords | None:
        """The bad words of P texts, None where they have none."""
        words = [text.bad_words_token_ids for text in texts]
        if not any(words):
            return None
        most = max(len(word) for of_request in words for word in of_request) - 1
        num_words = max(map(len, words))
        any_tokens = [_ANY_TOKEN_ID] * most
        beginnings = [
            [[*any_tokens, *word[:-1]][len(word) - 1 :] for word in of_request]
            + [any_tokens] * (num_words - len(of_request))
            for of_request in words
        ]
        # A slice from -0 would be all of it.
        outputs = [text.output_token_ids for text in texts]
        tails = [([-1] * most + list(output[-most:]))[-most:] if most else [] for output in outputs]
        return cls(
            torch.tensor(beginnings, dtype=torch.int64, device=device),
            _padded([[word[-1] for word in of_request] for of_request in words], 0, device),
            _padded([[-torch.inf] * len(of_request) for of_request in words], 0.0, device),
            torch.tensor(tails, dtype=torch.int64, device=device),
        )

    def apply(self, scores: Tensor, rows: ProcessedRows) -> Tensor:
        """Adds minus infinity to the ids that would finish a word."""
        said = torch.cat([self.tails, rows.draft_ids], 1)[rows.place]
        places = torch.arange(self.tails.shape[1], device=said.device)
        tail = said.gather(1, rows.depth.unsqueeze(-1) + places).unsqueeze(1)
        beginnings = self.beginnings[rows.place]
        is_begun = ((beginnings == tail) | (beginnings == _ANY_TOKEN_ID)).all(-1)
        penalties = self.penalties[rows.place].to(scores.dtype).where(is_begun, 0)
        return scores.scatter_add_(-1, self.last_ids[rows.place], penalties)


def _padded(lists: Sequence[Sequence[float]], filler: float, device: torch.device) -> Tensor:
    """Lists of any lengths to [P, longest], int64 or float64 as the filler is."""
    width = max(map(len, lists))
    dtype = torch.int64 if isinstance(filler, int) else torch.float64
    rows = [[*values, *[filler] * (width - len(values))] for values in lists]
    return torch.tensor(rows, dtype=dtype, device=device).view(len(lists), width)
