"""The logits processors for one row in plain Python: the reference of the tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from outrider.sampling_params import SamplingParams


def process_logits_naive(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_token_ids: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[float]:
    """The logits of one row after everything that comes before the temperature.

    Args:
        logits: V numbers.
        params: of the request.
        prompt: its prompt.
        output: its output before the row, the drafts before the row included.
        stop_token_ids: what ends its output.
        bad_words: sequences that its output must not hold.
    """
    scores = list(logits)
    for word in bad_words:
        beginning = list(word[:-1])
        if list(output[len(output) - len(beginning) :]) == beginning:
            scores[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token_id in stop_token_ids:
            scores[token_id] = -math.inf
    for token_id, bias in (params.logit_bias or {}).items():
        scores[token_id] += bias
    for token_id in {*prompt, *output}:
        is_positive = scores[token_id] > 0
        scores[token_id] *= (
            1 / params.repetition_penalty if is_positive else params.repetition_penalty
        )
    for token_id in set(output):
        scores[token_id] -= params.frequency_penalty * list(output).count(token_id)
        scores[token_id] -= params.presence_penalty
    return scores
