"""Picks out of rows of log probabilities what a request is told: its token, and the likeliest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.logprobs import TokenLogprobs


@dataclass(frozen=True)
class LogprobReport:
    """What N rows say of their tokens, still on the device.

    Attributes:
        token_ids: [N, 1 + M] int64, the row's own token, then the likeliest in falling order.
        logprobs: [N, 1 + M] float, of each of them.
        ranks: [N] int64, of the row's own token: 1 and as many more as are likelier than it.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    @classmethod
    def of(
        cls, logprobs: Tensor, token_ids: Tensor, num_top: int, known_ids: Tensor | None = None
    ) -> LogprobReport:
        """Looks up and ranks; of equals the lowest id comes first.

        Args:
            logprobs: [N, V] float.
            token_ids: [N] int64; what stands for no token is looked up as id 0.
            num_top: M, at most as many as there are ids.
            known_ids: [A] int64, ascending: those that may be listed and count in a rank, or None
                for all.
        """
        own_ids = token_ids.clamp(min=0).unsqueeze(-1)
        own = logprobs.gather(-1, own_ids)
        if known_ids is not None:
            logprobs = logprobs[:, known_ids]
        top, top_ids = _likeliest(logprobs, num_top)
        if known_ids is not None:
            top_ids = known_ids[top_ids]
        return cls(
            torch.cat([own_ids, top_ids], -1),
            torch.cat([own, top], -1),
            1 + (logprobs > own).sum(-1),
        )

    def to_host(self, num_top: list[int]) -> list[TokenLogprobs]:
        """Waits for the device.

        Args:
            num_top: of each row, how many of the likeliest it reports.
        """
        rows = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            num_top,
            strict=True,
        )
        return [
            TokenLogprobs(token_ids[: 1 + num], logprobs[: 1 + num], rank)
            for token_ids, logprobs, rank, num in rows
        ]


def raw_logprobs(logits: Tensor) -> Tensor:
    """[N, V] logits of the model to its log probabilities, in float32 or better."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def num_reported(wanted: int | None, vocab_size: int, known_ids: Tensor | None) -> int:
    """How many of the likeliest tokens are reported: as many as asked for, -1 is all there are."""
    assert wanted is not None, "who asks names a number"
    num_known = vocab_size if known_ids is None else known_ids.shape[0]
    return num_known if wanted < 0 else min(wanted, num_known)


def _likeliest(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Values and ids [N, M] of the largest entries, the lowest id first among equals.

    Which of equals `topk` returns is not said, so it finds the value at the edge alone.
    """
    if num_top == 0:
        return logprobs[:, :0], torch.empty_like(logprobs[:, :0], dtype=torch.int64)
    vocab_size = logprobs.shape[-1]
    edge = logprobs.topk(num_top).values[:, -1:]
    is_above = logprobs > edge
    num_tied = num_top - is_above.sum(-1, keepdim=True)
    is_tied = logprobs == edge
    is_first_tie = is_tied & (is_tied.cumsum(-1, dtype=torch.int32) <= num_tied)
    # The chosen ids in ascending order: their distance from the end, the largest first.
    distance = torch.arange(vocab_size, 0, -1, dtype=torch.int32, device=logprobs.device)
    ids = vocab_size - distance.where(is_above | is_first_tie, 0).topk(num_top).values.long()
    # A row of NaN has no ids; whoever reads it knows.
    ids = ids.clamp(max=vocab_size - 1)
    values, order = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
