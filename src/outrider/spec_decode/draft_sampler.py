"""Draws draft tokens, and remembers the law each was drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.sampling import (
    Purpose,
    compute_probs,
    gumbel_noise,
    sample_from_probs,
    sample_with_gumbel,
    uniforms,
)
from outrider.spec_decode.request_sampling import (
    RequestSampling,
    SamplingDefaults,
    greedy_token_ids,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.config import DraftSampleMethod
    from outrider.request import Request


@dataclass(frozen=True)
class DraftSampling:
    """Parameters and random keys of the requests of one iteration.

    Attributes:
        gathered: of the b requests.
        starts: [b] int64, position of the first token that the next window decides.
        is_coupled: [b] bool, requests under the rule `coupled`.
        has_coupled: some are.
        has_uncoupled: some are not.
    """

    gathered: RequestSampling
    starts: Tensor
    is_coupled: Tensor
    has_coupled: bool
    has_uncoupled: bool


class DraftSampler:
    """Draws under the request's own parameters, or takes the argmax as a one-hot proposal.

    Args:
        defaults: rule and vocabulary.
        method: "probabilistic" or "greedy".
    """

    def __init__(self, defaults: SamplingDefaults, method: DraftSampleMethod) -> None:
        self._defaults = defaults
        self._is_one_hot = method == "greedy"
        self._allowed_mask = defaults.allowed_mask()

    def start(self, requests: Sequence[Request], starts: Sequence[int]) -> DraftSampling:
        """Gathers what all draft steps of an iteration need.

        Args:
            requests: b of them.
            starts: position of the first token that the next window decides.
        """
        device = self._defaults.device
        is_coupled = [self._defaults.rule(request) == "coupled" for request in requests]
        return DraftSampling(
            gathered=RequestSampling.from_requests(requests, self._allowed_mask, device),
            starts=torch.tensor(starts, device=device),
            is_coupled=torch.tensor(is_coupled, device=device),
            has_coupled=any(is_coupled),
            has_uncoupled=not all(is_coupled),
        )

    def draw(
        self, logits: Tensor, sampling: DraftSampling, active: Sequence[int], spec_step_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draws one draft for each active request.

        Args:
            logits: [a, V] of the active requests.
            sampling: of all b requests.
            active: which of the b these are.
            spec_step_idx: 0-based depth in the window.

        Returns:
            token ids [a] int64, always ids of the vocabulary, and the laws [a, V] they were drawn
            from, or None for one-hot drafts. A row whose logits are not finite has a law of NaN,
            by which verification knows that nothing was really drawn.
        """
        gathered = sampling.gathered
        if self._is_one_hot or gathered.is_greedy:
            # A row without a finite maximum proposes id 0, as good as any: verification decides.
            return greedy_token_ids(logits, self._allowed_mask).clamp_(min=0), None
        rows = torch.tensor(active, device=logits.device)
        probs = compute_probs(logits, gathered.params.rows(rows))
        seeds, choices, starts = gathered.seeds[rows], gathered.choices[rows], sampling.starts[rows]
        depth = torch.full_like(starts, spec_step_idx)
        token_ids = None
        if sampling.has_uncoupled:
            token_ids = sample_from_probs(
                probs, uniforms(seeds, choices, starts, depth, Purpose.DRAFT)
            )
        if sampling.has_coupled:
            noise = gumbel_noise(seeds, choices, starts + depth, probs.shape[-1])
            coupled = sample_with_gumbel(probs, noise)
            token_ids = (
                coupled
                if token_ids is None
                else torch.where(sampling.is_coupled[rows], coupled, token_ids)
            )
        assert token_ids is not None, "every request has a rule"
        return token_ids, probs
