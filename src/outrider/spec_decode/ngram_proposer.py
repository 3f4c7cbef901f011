"""Drafts by prompt look-up: what followed the last tokens where they stood before.

The text of a request is its prompt and all that it has emitted. The longest of its ends of
`prompt_lookup_min` to `prompt_lookup_max` tokens that also stands earlier in it is looked up where
it stands last, and the tokens after that are the drafts:

    text    x y z . . . x y z a b c . . . y z       end "y z" stands earlier, last before "a"
    drafts  a b c

Where fewer tokens follow than are wanted, the text is read on as if the drafts were part of it, so
that "a b a b" goes on "a b a b". This needs no model beside the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch

from outrider.batch import PLACEHOLDER_TOKEN_ID, DraftTokens, SampledTokens, ScheduledBatch
from outrider.spec_decode.draft_length import draft_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from outrider.request import Request

    TokenIds = NDArray[np.int64]

_LEAST_CAPACITY = 256


class NgramProposer:
    """The Proposer of `method: ngram`.

    Args:
        num_speculative_tokens: K.
        prompt_lookup_min: shortest end of a text that is looked up, 1 or more.
        prompt_lookup_max: longest one.
        max_model_len: positions from here on get no draft; None is no such limit.
    """

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        prompt_lookup_min: int,
        prompt_lookup_max: int,
        max_model_len: int | None = None,
    ) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._prompt_lookup_min = prompt_lookup_min
        self._prompt_lookup_max = prompt_lookup_max
        self._max_model_len = max_model_len
        # By request, not by its id: an id may be given again, and a request that is gone is none.
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()

    def propose(
        self, batch: ScheduledBatch, hidden_states: Tensor, result: SampledTokens
    ) -> DraftTokens | None:
        """Looks up every request that emitted something; where nothing is found it gets no draft.

        The drafts are one-hot, a function of the text alone.
        """
        rows = [
            self._drafts(request, new_ids) if new_ids else ()
            for request, new_ids in zip(batch.requests, result.output_token_ids, strict=True)
        ]
        width = max(map(len, rows), default=0)
        if not width:
            return None
        token_ids = np.full((len(rows), width), PLACEHOLDER_TOKEN_ID)
        for i, row in enumerate(rows):
            token_ids[i, : len(row)] = row
        on_device = torch.from_numpy(token_ids).to(hidden_states.device)
        return DraftTokens(on_device, None, [len(row) for row in rows])

    def _drafts(self, request: Request, new_ids: Sequence[int]) -> TokenIds | tuple[()]:
        length = draft_length(
            request, len(new_ids), self._num_speculative_tokens, self._max_model_len
        )
        if not length:
            return ()
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text()
        # A step that failed after this has left tokens behind which the request never took up.
        text.truncate(len(request.token_ids))
        text.extend(request.token_ids[len(text) :])
        text.extend(new_ids)
        place = look_up(text.token_ids, self._prompt_lookup_min, self._prompt_lookup_max)
        if place is None:
            return ()
        drafts = read_on(text.token_ids, place, length)
        if request.grammar is None:
            return drafts
        # A function of the text, as the drafts are.
        emitted = [*request.output_token_ids, *new_ids]
        num_certain, listed = request.num_output_tokens, drafts.tolist()
        return drafts[: request.grammar.num_allowed(emitted, num_certain, listed)]


def look_up(token_ids: TokenIds, shortest: int, longest: int) -> int | None:
    """The place after the last earlier occurrence of the longest end of a text that has one.

    Args:
        token_ids: [N], at least one.
        shortest: length of the end at least, 1 or more.
        longest: at most.

    Returns:
        A place in 1..N-1, or None where no end of these lengths stands earlier in the text.
    """
    found = None
    # Places after an occurrence of the last n tokens, ascending, for n = 1, 2, ...
    places = np.flatnonzero(token_ids[:-1] == token_ids[-1]) + 1
    for n in range(1, longest + 1):
        if n > 1:
            places = places[places >= n]
            places = places[token_ids[places - n] == token_ids[-n]] if len(places) else places
        if not len(places):
            break
        if n >= shortest:
            found = int(places[-1])
    return found


def read_on(token_ids: TokenIds, place: int, length: int) -> TokenIds:
    """So many tokens from a place of a text [N] on; past its end it is what was just read."""
    return token_ids[place + np.arange(length) % (len(token_ids) - place)]


class _Text:
    """A list of token ids that grows, as an array."""

    def __init__(self) -> None:
        self._buffer = np.empty(_LEAST_CAPACITY, np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def token_ids(self) -> TokenIds:
        """All of them, [N]."""
        return self._buffer[: self._size]

    def truncate(self, size: int) -> None:
        """Drops what is past the first `size` ids."""
        self._size = min(self._size, size)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds ids at the end."""
        size = self._size + len(token_ids)
        if size > len(self._buffer):
            buffer = np.empty(2 * size, np.int64)
            buffer[: self._size] = self.token_ids
            self._buffer = buffer
        self._buffer[self._size : size] = token_ids
        self._size = size
