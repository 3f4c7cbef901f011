"""The windows that verification judges: whose rows they are, and what was drafted in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID, ScheduledBatch
from outrider.spec_decode.request_sampling import RequestSampling, SamplingDefaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.request import Request
    from outrider.sampling import RowProcessors


@dataclass(frozen=True)
class SampledWindows:
    """The b requests of a batch that sample, each with one row per draft and one more.

    Attributes:
        members: which requests of the batch they are.
        requests: b of them.
        counts: drafts of each; K the largest.
        rows: [b, K + 1] int64, row of the logits for each request and depth; surplus depths repeat
            the request's last.
        draft_ids: [b, K] int64, placeholders past the end.
        draft_probs: [b, K, V], or None for one-hot drafts.
        gathered: parameters and random keys.
    """

    members: Sequence[int]
    requests: Sequence[Request]
    counts: Sequence[int]
    rows: Tensor
    draft_ids: Tensor
    draft_probs: Tensor | None
    gathered: RequestSampling

    @classmethod
    def of(cls, batch: ScheduledBatch, defaults: SamplingDefaults) -> SampledWindows | None:
        """The windows of a batch, None where nobody samples."""
        members = [i for i, is_sampling in enumerate(batch.is_sampling) if is_sampling]
        if not members:
            return None
        counts = [batch.spans[i].num_drafts for i in members]
        requests = [batch.requests[i] for i in members]
        num_drafts = torch.tensor(counts, device=defaults.device)
        draft_ids, draft_probs = _drafts(batch, members, num_drafts, max(counts))
        return cls(
            members=members,
            requests=requests,
            counts=counts,
            rows=_padded_rows(num_drafts, max(counts)),
            draft_ids=draft_ids,
            draft_probs=draft_probs,
            gathered=RequestSampling.from_requests(requests, defaults),
        )

    def owners(self) -> Tensor:
        """[R] int64: the window of each row of the logits."""
        counts = torch.tensor(self.counts, device=self.rows.device)
        windows = torch.arange(len(self.counts), device=counts.device)
        num_rows = sum(self.counts) + len(self.counts)
        return torch.repeat_interleave(windows, counts + 1, output_size=num_rows)

    def processors(self) -> RowProcessors | None:
        """What is done to the rows of the logits, None if nothing."""
        if self.gathered.processors is None:
            return None
        places = [(i, depth) for i, count in enumerate(self.counts) for depth in range(count + 1)]
        return self._processors_at(places)

    def padded_processors(self, windows: Sequence[int]) -> RowProcessors | None:
        """The same for `rows[windows]`, flattened."""
        width = self.rows.shape[1]
        return self._processors_at(
            [(i, min(depth, self.counts[i])) for i in windows for depth in range(width)]
        )

    def _processors_at(self, places: Sequence[tuple[int, int]]) -> RowProcessors | None:
        owners, depths = [i for i, _ in places], [depth for _, depth in places]
        return self.gathered.row_processors(owners, depths, self.draft_ids)


def _padded_rows(num_drafts: Tensor, width: int) -> Tensor:
    """[b, K + 1] row of the logits for each request and depth."""
    first = (num_drafts + 1).cumsum(0) - (num_drafts + 1)
    depths = torch.arange(width + 1, device=num_drafts.device)
    return first[:, None] + torch.minimum(depths, num_drafts[:, None])


def _drafts(
    batch: ScheduledBatch, members: Sequence[int], num_drafts: Tensor, width: int
) -> tuple[Tensor, Tensor | None]:
    """Draft ids [b, K] with placeholders past the end, and their laws [b, K, V] or None."""
    drafts = batch.drafts
    if drafts is None or width == 0:
        return num_drafts.new_empty(len(members), 0), None
    index = torch.tensor(members, device=num_drafts.device)
    is_draft = torch.arange(width, device=num_drafts.device) < num_drafts[:, None]
    ids = torch.where(is_draft, drafts.token_ids[index, :width], PLACEHOLDER_TOKEN_ID)
    probs = None if drafts.probs is None else drafts.probs[index, :width]
    return ids, probs
