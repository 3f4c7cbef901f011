"""The way of one output through its grammar, with drafts at its end that come and go.

The grammar's part of the step: drafting asks for masks at each depth, verification for those of
every row, and what is emitted shares its beginning with what was drafted. All three name the whole
text they ask about; the path takes back the tokens in which that differs from the text before, and
accepts the others. So nothing has to be told when drafts are rejected, when a step fails, or when a
request loses its caches and runs again.

An ambiguous grammar takes ever longer to follow, on the thread that all requests run on. A path
therefore has a budget of processor time, far above what others need, and is stuck past it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import int32
    from numpy.typing import NDArray

    from outrider.grammar.matcher import Matcher

# Of processor time: for an output as such, and for each of its tokens. A token takes some masks
# for its drafts, of usually less than a millisecond each.
BUDGET_S = 2.0
BUDGET_PER_TOKEN_S = 0.02


class GrammarPath:
    """The `OutputGrammar` of one output.

    Args:
        matcher: at the beginning of its grammar.
        clock: seconds that this thread has computed.
    """

    def __init__(self, matcher: Matcher, clock: Callable[[], float] = time.thread_time) -> None:
        self._matcher = matcher
        self._clock = clock
        self._spent_s = 0.0
        self._token_ids: list[int] = []
        self._num_certain = 0
        # Of the tokens, how many the matcher has accepted: those from the first that it refused, or
        # from the end of the text on, are none of its business.
        self._num_matched = 0
        # Masks by the number of tokens they come after.
        self._masks: dict[int, NDArray[int32] | None] = {}
        self._is_stuck = False

    @property
    def is_stuck(self) -> bool:
        """Whether nothing may follow and the text is not complete, or the budget is used up."""
        return self._is_stuck

    def allowed_after(self, token_ids: Sequence[int], num_certain: int) -> NDArray[int32] | None:
        """What may follow an output (`OutputGrammar.allowed_after`)."""
        num_tokens = len(token_ids)
        # Drafting has asked for most of what verification asks for: that is no way back.
        if self._num_shared(token_ids) < num_tokens or num_tokens not in self._masks:
            self._move(token_ids)
        self._confirm(num_certain)
        if num_tokens not in self._masks:
            if self._num_matched < num_tokens or self._matcher.is_terminated():
                return None
            start = self._clock()
            self._masks[num_tokens] = self._matcher.bitmask()
            self._spent_s += self._clock() - start
        mask = self._masks[num_tokens]
        if mask is not None and self._spent_s > BUDGET_S + BUDGET_PER_TOKEN_S * num_certain:
            mask = np.zeros_like(mask)
        if mask is not None and num_tokens == num_certain and not mask.any():
            self._is_stuck = True
        return mask

    def num_allowed(
        self, token_ids: Sequence[int], num_certain: int, draft_ids: Sequence[int]
    ) -> int:
        """How many drafts may follow an output (`OutputGrammar.num_allowed`)."""
        self._move([*token_ids, *draft_ids])
        self._confirm(num_certain)
        return max(self._num_matched - len(token_ids), 0)

    def _num_shared(self, token_ids: Sequence[int]) -> int:
        """How many tokens from the beginning a text has in common with the last one."""
        shortest = min(len(token_ids), len(self._token_ids))
        for index in range(min(self._num_certain, shortest), shortest):
            if token_ids[index] != self._token_ids[index]:
                return index
        return shortest

    def _move(self, token_ids: Sequence[int]) -> None:
        """Brings the matcher to the end of a text."""
        start = self._clock()
        num_shared = self._num_shared(token_ids)
        self._take_back(num_shared)
        for token_id in token_ids[num_shared:]:
            is_at_end = self._num_matched == len(self._token_ids)
            if is_at_end and not self._matcher.is_terminated() and self._matcher.accept(token_id):
                self._num_matched += 1
            self._token_ids.append(token_id)
        self._spent_s += self._clock() - start

    def _confirm(self, num_certain: int) -> None:
        """Forgets the masks of places that are never come back to."""
        self._num_certain = max(self._num_certain, num_certain)
        for place in [place for place in self._masks if place < self._num_certain]:
            del self._masks[place]

    def _take_back(self, num_kept: int) -> None:
        """Drops all tokens but the first so many."""
        if num_kept < self._num_matched:
            self._matcher.rollback(self._num_matched - num_kept)
            self._num_matched = num_kept
        del self._token_ids[num_kept:]
        for place in [place for place in self._masks if place > num_kept]:
            del self._masks[place]
