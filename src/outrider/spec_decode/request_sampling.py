"""Turns the parameters of a batch's requests into tensors for drafting and verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.sampling import SamplingTensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.config import RejectionSampleMethod
    from outrider.request import Request


@dataclass(frozen=True)
class SamplingDefaults:
    """What holds for every request of an engine.

    Attributes:
        rejection_sample_method: rule of requests that name none.
        vocab_size: V.
        num_allowed_tokens: ids from here on are padding of the vocabulary: never drawn.
        device: of the tensors.
    """

    rejection_sample_method: RejectionSampleMethod
    vocab_size: int
    num_allowed_tokens: int
    device: torch.device

    def allowed_mask(self) -> Tensor | None:
        """[V] bool, or None where every id may be drawn."""
        if self.num_allowed_tokens >= self.vocab_size:
            return None
        return torch.arange(self.vocab_size, device=self.device) < self.num_allowed_tokens

    def rule(self, request: Request) -> RejectionSampleMethod:
        """The rule a request is verified with."""
        return request.params.rejection_sample_method or self.rejection_sample_method


@dataclass(frozen=True)
class RequestSampling:
    """Parameters and random keys of B requests.

    Attributes:
        params: of the B rows.
        seeds: [B] int64.
        choices: [B] int64.
        is_greedy: every request takes the argmax.
    """

    params: SamplingTensors
    seeds: Tensor
    choices: Tensor
    is_greedy: bool

    @classmethod
    def from_requests(
        cls, requests: Sequence[Request], allowed_mask: Tensor | None, device: torch.device
    ) -> RequestSampling:
        """Gathers the requests' own numbers."""
        params = [request.params for request in requests]
        return cls(
            params=SamplingTensors.from_values(
                [p.temperature for p in params],
                [p.top_k for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                device=device,
                allowed_mask=allowed_mask,
            ),
            seeds=torch.tensor([request.seed for request in requests], device=device),
            choices=torch.tensor([request.choice for request in requests], device=device),
            is_greedy=all(p.is_greedy for p in params),
        )


def greedy_token_ids(logits: Tensor, allowed_mask: Tensor | None) -> Tensor:
    """Argmax of allowed ids, [N, V] to [N]; -1 where the row has no finite maximum or holds NaN."""
    if allowed_mask is not None:
        logits = logits.masked_fill(~allowed_mask, -torch.inf)
    peak, token_ids = logits.max(-1)
    return torch.where(torch.isfinite(peak), token_ids, -1)
