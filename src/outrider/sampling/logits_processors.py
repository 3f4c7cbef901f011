"""Changes logits by what a request forbids and favours, and by what it has said so far.

The part of `compute_probs` that looks at a request's history. Row j of a window is processed as
plain decoding would process it: its history is the tokens of the request and the drafts before it,
which stay on the device, unless the request has a grammar. Requests that use no processor cost
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.sampling.grammar_masks import GrammarMasks
from outrider.sampling.penalties import Penalties, has_penalty
from outrider.sampling.processed_rows import LogitsProcessor, ProcessedRows, TextSoFar
from outrider.sampling.token_biases import BadWords, LogitBias, MinTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int32
    from numpy.typing import NDArray

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
        masks: of the n rows that have to follow a grammar, applied first; None where none has.
    """

    index: Tensor | None
    rows: ProcessedRows
    processors: Sequence[LogitsProcessor]
    masks: GrammarMasks | None = None

    def apply(self, scores: Tensor) -> Tensor:
        """Returns the new [N, V]; the old one is not changed."""
        changed = scores.clone() if self.index is None else scores[self.index]
        if self.masks is None:
            changed = self._process(changed)
        else:
            allowed = self.masks.exclude(changed)
            changed = self.masks.restore(self._process(allowed.clone()), allowed)
        return changed if self.index is None else scores.index_copy(0, self.index, changed)

    def _process(self, scores: Tensor) -> Tensor:
        for processor in self.processors:
            scores = processor.apply(scores, self.rows)
        return scores


@dataclass(frozen=True)
class LogitsProcessors:
    """What the requests of a batch do to logits, with what they have said before the window.

    Attributes:
        users: the P of the b requests that use a processor.
        places: of each of the b requests among them, or _NO_PLACE.
        processors: over the P requests, in the order they are applied in.
        texts: of the P requests.
        vocab_size: V.
    """

    users: Sequence[int]
    places: Sequence[int]
    processors: Sequence[LogitsProcessor]
    texts: Sequence[TextSoFar]
    vocab_size: int

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
        found = [processor for processor in processors if processor is not None]
        return cls(users, places, found, used, vocab_size)

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
        masks = self._grammar_masks([(owners[row], depths[row]) for row in index], draft_ids)
        return RowProcessors(where, rows, self.processors, masks)

    def _grammar_masks(
        self, rows: Sequence[tuple[int, int]], draft_ids: Tensor
    ) -> GrammarMasks | None:
        """The masks of rows, each of a request and after so many drafts; None where none has any.

        A grammar runs on the host, so drafts of a request that has one are read there.
        """
        with_grammar = [i for i in self.users if self.texts[self.places[i]].grammar is not None]
        if not with_grammar:
            return None
        on_host = draft_ids[torch.tensor(with_grammar, device=draft_ids.device)].tolist()
        drafts = dict(zip(with_grammar, on_host, strict=True))
        masks = [
            _mask(self.texts[self.places[owner]], drafts[owner][:depth])
            if owner in drafts
            else None
            for owner, depth in rows
        ]
        return GrammarMasks.of(masks, self.vocab_size, draft_ids.device)


def _mask(text: TextSoFar, draft_ids: list[int]) -> NDArray[int32] | None:
    """What a grammar lets pass after a text and drafts; nothing is told past a placeholder."""
    assert text.grammar is not None, "the text has a grammar"
    if any(token_id < 0 for token_id in draft_ids):
        return None
    return text.grammar.allowed_after([*text.output_token_ids, *draft_ids], text.num_certain_tokens)


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
