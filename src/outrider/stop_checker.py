"""Where an output ends, and what its text is up to there.

A stop is looked for token by token, whatever number of tokens a step brings, so that a run of
accepted drafts ends where plain decoding would. Text that may still turn out to be the beginning of
a stop string is held back: what has been shown is never taken back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outrider.tokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.sampling_params import SamplingParams
    from outrider.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class EmittedRun:
    """What is left of a run of new tokens.

    Attributes:
        token_ids: those that are emitted, with the one that ended the output.
        text: what became certain; with a finish reason, all that was held back.
        finish_reason: None while the output goes on.
        stop_reason: the id or the text that ended it; None where the end-of-sequence token did.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class StopChecker:
    """The end of one output.

    A token ends it by completing a stop string, by being a stop id, or by being the last there is
    room for, in this order. The first `min_tokens` tokens end nothing but by the last of these: a
    stop string counts only if some of its text came after them.

    Args:
        params: what ends it, besides `stop_token_ids`.
        stop_token_ids: ids that end it, the end-of-sequence ids included unless ignored.
        max_output_tokens: tokens at most.
        tokenizer: for the text; None leaves it empty.
        final_ids: of the stop ids, those that end it among the first `min_tokens` too.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        max_output_tokens: int,
        tokenizer: Tokenizer | None,
        final_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self._final_ids = final_ids
        self._named_ids = frozenset(params.stop_token_ids or ())
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._room = max_output_tokens
        self._num_tokens = 0
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._search = _StopStringSearch(tuple(params.stop or ()))

    def extend(self, token_ids: Sequence[int]) -> EmittedRun:
        """Takes up the tokens of a step, up to the first that ends the output."""
        kept: list[int] = []
        text = ""
        for token_id in token_ids:
            kept.append(token_id)
            self._num_tokens += 1
            may_stop = self._num_tokens > self._min_tokens or token_id in self._final_ids
            is_stop_id = may_stop and token_id in self.stop_token_ids
            if not is_stop_id or self._includes_stop:
                certain, stop = self._search.extend(self._decode(token_id), may_stop)
                text += certain
                if stop is not None:
                    text += stop if self._includes_stop else ""
                    self._drop()
                    return EmittedRun(kept, text, "stop", stop)
            if is_stop_id:
                reason = token_id if token_id in self._named_ids else None
                return EmittedRun(kept, text + self.flush(), "stop", reason)
            if self._num_tokens == self._room:
                return EmittedRun(kept, text + self.flush(), "length")
        return EmittedRun(kept, text)

    def flush(self) -> str:
        """What is held back, where the output ends without a stop string; nothing after that."""
        return self._search.drop() + self._drop()

    def _decode(self, token_id: int) -> str:
        return "" if self._detokenizer is None else self._detokenizer.append([token_id])

    def _drop(self) -> str:
        """The bytes of a character that was never completed, as text."""
        return "" if self._detokenizer is None else self._detokenizer.flush()


class _StopStringSearch:
    """Finds the first stop string in a text that grows, and holds back what may become one.

    Held is the longest end of the text that is the beginning of a stop string. A stop string that
    the next piece completes begins there or later, so nothing before it is ever looked at again.

    Args:
        stops: none empty; of two that begin at one place the one listed first is found.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._by_first_char: dict[str, list[str]] = {}
        for stop in stops:
            self._by_first_char.setdefault(stop[0], []).append(stop)
        self._held = ""

    def extend(self, piece: str, may_stop: bool) -> tuple[str, str | None]:
        """Takes up the text that a token adds.

        Args:
            piece: it; empty where the token completes no character.
            may_stop: whether a stop string that ends within the piece counts.

        Returns:
            The text that is certain now, and the stop string that follows it or None.
        """
        if not piece or not self._stops:
            return piece, None
        num_old, text = len(self._held), self._held + piece
        if may_stop:
            places = (text.find(stop, max(num_old + 1 - len(stop), 0)) for stop in self._stops)
            found = [(place, i) for i, place in enumerate(places) if place >= 0]
            if found:
                place, i = min(found)
                self._held = ""
                return text[:place], self._stops[i]
        place = self._first_beginning(text)
        self._held = text[place:]
        return text[:place], None

    def drop(self) -> str:
        """What is held, which then is no longer."""
        held, self._held = self._held, ""
        return held

    def _first_beginning(self, text: str) -> int:
        """Where the longest end of a text starts that a stop string goes on from."""
        for place, char in enumerate(text):
            stops = self._by_first_char.get(char)
            if stops is not None:
                rest = text[place:]
                if any(len(stop) > len(rest) and stop.startswith(rest) for stop in stops):
                    return place
        return len(text)
