"""Log probabilities as the two APIs write them. JSON has no infinity: -9999.0 stands for less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.tokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.logprobs import Logprob, LogprobsOfPosition
    from outrider.tokenizer import Tokenizer

# vLLM's, so that clients know it.
LEAST_LOGPROB = -9999.0


class TextOffsets:
    """Where each token of a growing text begins in it, in characters.

    A token that only completes a character begins where that character does.

    Args:
        tokenizer: of the tokens.
        skip_special_tokens: whether the text is without them.
        start: characters in front of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int = 0) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self.end = start

    def of(self, token_id: int) -> int:
        """Where the next token begins."""
        offset = self.end
        self.end += len(self._detokenizer.append([token_id]))
        return offset


class LogprobWriter:
    """Writes the log probabilities of tokens.

    Args:
        tokenizer: of the tokens.
        num_top: likeliest tokens that are listed at each position.
        writes_ids: write a token as "token_id:7" instead of its text, of which several may be one.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, writes_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._writes_ids = writes_ids

    def of_completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[LogprobsOfPosition | None],
        offsets: TextOffsets,
    ) -> dict[str, list[Any]]:
        """The object `logprobs` of a completion's choice.

        Args:
            token_ids: what stands there.
            positions: one for each; None for the first token of a prompt.
            offsets: of the text so far; it is moved on.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            if position is None:
                tokens.append(self._token(token_id))
                logprobs.append(None)
                tops.append(None)
                continue
            top: dict[str, float] = {}
            chosen = position[token_id]
            tokens.append(self._token(token_id, chosen))
            logprobs.append(finite(chosen.logprob))
            for one_id, one in position.items():
                if one_id == token_id or one.rank <= self._num_top:
                    # The chosen token comes first, so a namesake does not take its place.
                    top.setdefault(self._token(one_id, one), finite(one.logprob))
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": [offsets.of(token_id) for token_id in token_ids],
        }

    def of_chat(
        self, token_ids: Sequence[int], positions: Sequence[LogprobsOfPosition]
    ) -> list[dict[str, Any]]:
        """The list `logprobs.content` of a chat completion's choice."""
        entries = []
        for token_id, position in zip(token_ids, positions, strict=True):
            likeliest = sorted(position.items(), key=lambda item: -item[1].logprob)
            entries.append(
                {
                    **self._chat_token(token_id, position[token_id]),
                    "top_logprobs": [
                        self._chat_token(*item) for item in likeliest[: self._num_top]
                    ],
                }
            )
        return entries

    def _chat_token(self, token_id: int, one: Logprob) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token_id, skip_special_tokens=False)
        return {
            "token": self._token(token_id, one),
            "logprob": finite(one.logprob),
            "bytes": list(spelled),
        }

    def _token(self, token_id: int, one: Logprob | None = None) -> str:
        if self._writes_ids:
            return f"token_id:{token_id}"
        if one is not None:
            return one.decoded_token
        return self._tokenizer.token_bytes(token_id, False).decode(errors="replace")


def of_prompt(
    positions: Sequence[LogprobsOfPosition | None],
) -> list[dict[str, dict[str, Any]] | None]:
    """VLLM's list `prompt_logprobs`, the first entry null."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in position.items()
        }
        for position in positions
    ]


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
