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
        token_ids: those that are emitted, the stop token included.
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

    Args:
        params: what ends it, besides `stop_token_ids`.
        stop_token_ids: ids that end it, the end-of-sequence ids included unless ignored.
        max_output_tokens: tokens at most.
        tokenizer: for the text; None leaves it empty.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        max_output_tokens: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self._named_ids = frozenset(params.stop_token_ids or ())
        self._stop_strings = tuple(params.stop or ())
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._room = max_output_tokens
        self._num_tokens = 0
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        # What is decoded and not shown.
        self._held = ""

    def extend(self, token_ids: Sequence[int]) -> EmittedRun:
        """Takes up the tokens of a step, up to the first that ends the output."""
        kept: list[int] = []
        text = ""
        for token_id in token_ids:
            kept.append(token_id)
            self._num_tokens += 1
            if token_id in self.stop_token_ids and self._num_tokens > self._min_tokens:
                is_named = token_id in self._named_ids
                if self._includes_stop:
                    text += self._decode(token_id)
                text += self._flush()
                return EmittedRun(kept, text, "stop", token_id if is_named else None)
            text += self._decode(token_id)
            if self._num_tokens == self._room:
                return EmittedRun(kept, text + self._flush(), "length")
        return EmittedRun(kept, text)

    def flush(self) -> str:
        """What was held back, where the output ends from without."""
        return self._flush()

    def _decode(self, token_id: int) -> str:
        return "" if self._detokenizer is None else self._detokenizer.append([token_id])

    def _flush(self) -> str:
        text = self._held + ("" if self._detokenizer is None else self._detokenizer.flush())
        self._held = ""
        return text
