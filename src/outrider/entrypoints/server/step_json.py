"""The passes of the target behind a choice, as both APIs write them: where each token came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.tokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from outrider.outputs import CompletionOutput
    from outrider.tokenizer import Tokenizer


class StepWriter:
    """Writes the steps of the choices of one answer, which may come in parts.

    Args:
        tokenizer: of the checkpoint.
        skip_special_tokens: whether special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}

    def of(self, index: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The list `decode_steps` of a choice, or of the next part of one.

        A character that lies in several tokens is the text of the last of them. Texts are those of
        the tokens: of a stop string, of which the choice tells nothing, they tell.

        Args:
            index: of the choice in the answer.
            completion: what it tells of.
        """
        detokenizer = self._detokenizers.get(index)
        if detokenizer is None:
            detokenizer = IncrementalDetokenizer(self._tokenizer, self._skip_special_tokens)
            self._detokenizers[index] = detokenizer
        steps: list[dict[str, Any]] = []
        texts: list[str] = []
        start = 0
        for step in completion.steps:
            token_ids = completion.token_ids[start : start + step.num_tokens]
            start += step.num_tokens
            texts = [detokenizer.append([token_id]) for token_id in token_ids]
            steps.append(
                {
                    "num_draft_tokens": step.num_draft_tokens,
                    "token_ids": token_ids,
                    "token_sources": step.token_sources,
                    "token_texts": texts,
                }
            )
        if completion.finish_reason is not None and texts:
            texts[-1] += detokenizer.flush()
        return steps
