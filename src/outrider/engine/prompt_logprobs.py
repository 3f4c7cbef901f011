"""Reports how likely the target found a prompt, row by row as the prompt runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.sampling import LogprobReport, num_reported, raw_logprobs

if TYPE_CHECKING:
    from outrider.batch import ScheduledBatch
    from outrider.logprobs import TokenLogprobs
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.request import Request

# Logits at once: 64 MiB in float32, 67 rows of a vocabulary of 248k.
_MAX_LOGITS = 1 << 24


class PromptLogprobs:
    """Fills `Request.prompt_logprobs` of the requests that ask for them.

    Row i of a prompt decides token i + 1, and that is entry i. What is reported is the model's own
    law, before any parameter of the request, whatever the engine's `logprobs_mode`. Ids that no
    token has stand in no list and in no rank.

    Args:
        model: the target.
        known_ids: [A] int64, the ids that a token has, ascending, or None for all.
        max_logits: computed at once; one row at least.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        known_ids: Tensor | None,
        max_logits: int = _MAX_LOGITS,
    ) -> None:
        self._model = model
        self._known_ids = known_ids
        self._max_num_rows = max(max_logits // model.config.vocab_size, 1)

    def record(self, batch: ScheduledBatch, hidden_states: Tensor) -> None:
        """Takes up the prompt rows of a pass. Waits for the device where somebody asks.

        Args:
            batch: what ran.
            hidden_states: [T, W], streams of every row.
        """
        offset = 0
        for request, span in zip(batch.requests, batch.spans, strict=True):
            if request.prompt_logprobs is not None:
                streams = hidden_states[offset : offset + span.num_certain_rows]
                self._record(request, request.prompt_logprobs, span.start, streams)
            offset += span.num_rows

    def _record(
        self, request: Request, entries: list[TokenLogprobs], start: int, streams: Tensor
    ) -> None:
        """Of one request, whose rows from position `start` on have the streams [rows, W]."""
        wanted, vocab_size = request.params.prompt_logprobs, self._model.config.vocab_size
        num_top = num_reported(wanted, vocab_size, self._known_ids)
        end = min(start + len(streams), request.num_prompt_tokens - 1)
        # A request that lost its caches runs its prompt again, and was told of it already.
        while (first := len(entries)) < end:
            assert first >= start, "a row of the prompt was left out"
            stop = min(first + self._max_num_rows, end)
            logprobs = raw_logprobs(self._model.logits(streams[first - start : stop - start]))
            token_ids = torch.tensor(
                request.token_ids[first + 1 : stop + 1], device=logprobs.device
            )
            report = LogprobReport.of(logprobs, token_ids, num_top, self._known_ids)
            entries += report.to_host([num_top] * len(token_ids))
