"""Log probabilities of the tokens that verification lets pass: accepted, recovered and bonus alike.

Output token i of a window is judged by row i, whatever became of the drafts, so what is reported is
what plain decoding would report of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.sampling import LogprobReport, compute_logprobs, num_reported, raw_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outrider.logprobs import TokenLogprobs
    from outrider.spec_decode.request_sampling import SamplingDefaults
    from outrider.spec_decode.sampled_windows import SampledWindows


@dataclass(frozen=True)
class OutputLogprobs:
    """What the windows that ask for log probabilities report.

    Attributes:
        windows: which of the b windows they are.
        num_top: how many of the likeliest tokens each reports.
        report: of their padded rows, one window after the other.
        width: rows of each, K + 1.
    """

    windows: Sequence[int]
    num_top: Sequence[int]
    report: LogprobReport
    width: int

    @classmethod
    def of(
        cls,
        windows: SampledWindows,
        logits: Tensor,
        output_token_ids: Tensor,
        defaults: SamplingDefaults,
    ) -> OutputLogprobs | None:
        """Computes what is asked for, None where nobody asks.

        Ids that no token has stand in no list and in no rank; the raw law of the model has its mass
        on them as well.

        Args:
            windows: b of them.
            logits: [R, V] of the model.
            output_token_ids: [b, K + 1] int64.
            defaults: mode and vocabulary.
        """
        params = [request.params for request in windows.requests]
        asking = [i for i, p in enumerate(params) if p.logprobs is not None]
        if not asking:
            return None
        known_ids = defaults.known_ids
        num_top = [num_reported(params[i].logprobs, logits.shape[-1], known_ids) for i in asking]
        index = torch.tensor(asking, device=logits.device)
        rows = windows.rows[index].flatten()
        width = windows.rows.shape[1]
        if defaults.logprobs_mode == "raw_logprobs":
            logprobs = raw_logprobs(logits[rows])
        else:
            logprobs = compute_logprobs(
                logits[rows],
                windows.gathered.params.rows(index.repeat_interleave(width)),
                windows.padded_processors(asking),
            )
        token_ids = output_token_ids[index].flatten()
        report = LogprobReport.of(logprobs, token_ids, max(num_top), known_ids)
        return cls(asking, num_top, report, width)

    def to_host(self, num_windows: int) -> list[list[TokenLogprobs] | None]:
        """Of each window one entry per row, those past its end included; None if it asks none."""
        num_top = [num for num in self.num_top for _ in range(self.width)]
        entries = self.report.to_host(num_top)
        by_window: list[list[TokenLogprobs] | None] = [None] * num_windows
        for place, i in enumerate(self.windows):
            by_window[i] = entries[place * self.width : (place + 1) * self.width]
        return by_window
