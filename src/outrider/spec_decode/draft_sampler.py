"""Draws draft tokens, and remembers the law each was drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID
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
    from outrider.sampling import RowProcessors


@dataclass
class DraftSampling:
    """Parameters and random keys of the requests of one iteration, and what was drawn so far.

    Attributes:
        gathered: of the b requests.
        starts: [b] int64, position of the first token that the next window decides.
        is_coupled: [b] bool, requests under the rule `coupled`.
        has_coupled: some are.
        has_uncoupled: some are not.
        draft_ids: [b, steps so far] int64, placeholders where a request was not active; kept only
            where some request has processors.
    """

    gathered: RequestSampling
    starts: Tensor
    is_coupled: Tensor
    has_coupled: bool
    has_uncoupled: bool
    draft_ids: Tensor


class DraftSampler:
    """Draws under the request's own parameters, or takes the argmax as a one-hot proposal.

    Args:
        defaults: rule and vocabulary.
        method: "probabilistic" or "greedy".
    """

    def __init__(self, defaults: SamplingDefaults, method: DraftSampleMethod) -> None:
        self._defaults = defaults
        self._is_one_hot = method == "greedy"

    def start(
        self, requests: Sequence[Request], new_token_ids: Sequence[Sequence[int]]
    ) -> DraftSampling:
        """Gathers what all draft steps of an iteration need.

        Args:
            requests: b of them.
            new_token_ids: what each has just emitted, not yet among its tokens; the next window
                decides what follows.
        """
        device = self._defaults.device
        starts = [
            len(request.token_ids) + len(ids)
            for request, ids in zip(requests, new_token_ids, strict=True)
        ]
        is_coupled = [self._defaults.rule(request) == "coupled" for request in requests]
        return DraftSampling(
            gathered=RequestSampling.from_requests(requests, self._defaults, new_token_ids),
            starts=torch.tensor(starts, device=device),
            is_coupled=torch.tensor(is_coupled, device=device),
            has_coupled=any(is_coupled),
            has_uncoupled=not all(is_coupled),
            draft_ids=torch.empty(len(requests), 0, dtype=torch.int64, device=device),
        )

    def draw(
        self, logits: Tensor, sampling: DraftSampling, active: Sequence[int], spec_step_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draws one draft for each active request.

        Args:
            logits: [a, V] of the active requests.
            sampling: of all b requests; takes up what is drawn.
            active: which of the b these are; no other than in the step before.
            spec_step_idx: 0-based depth in the window.

        Returns:
            token ids [a] int64, always ids of the vocabulary, and the laws [a, V] they were drawn
            from, or None for one-hot drafts. A row whose logits are not finite has a law of NaN,
            by which verification knows that nothing was really drawn.
        """
        gathered = sampling.gathered
        processors = gathered.row_processors(
            active, [spec_step_idx] * len(active), sampling.draft_ids
        )
        if self._is_one_hot or gathered.is_greedy:
            # A row without a finite maximum proposes id 0, as good as any: verification decides.
            mask = self._defaults.allowed_mask
            token_ids, probs = greedy_token_ids(logits, mask, processors).clamp_(min=0), None
        else:
            token_ids, probs = _draw(logits, sampling, active, spec_step_idx, processors)
        if gathered.processors is not None:
            drawn = torch.full_like(sampling.starts, PLACEHOLDER_TOKEN_ID).unsqueeze(-1)
            drawn[torch.tensor(active, device=drawn.device), 0] = token_ids
            sampling.draft_ids = torch.cat([sampling.draft_ids, drawn], 1)
        return token_ids, probs


def _draw(
    logits: Tensor,
    sampling: DraftSampling,
    active: Sequence[int],
    spec_step_idx: int,
    processors: RowProcessors | None,
) -> tuple[Tensor, Tensor]:
    """Draws by each request's rule; arguments and result as in `DraftSampler.draw`."""
    gathered = sampling.gathered
    rows = torch.tensor(active, device=logits.device)
    probs = compute_probs(logits, gathered.params.rows(rows), processors)
    seeds, choices, starts = gathered.seeds[rows], gathered.choices[rows], sampling.starts[rows]
    depth = torch.full_like(starts, spec_step_idx)
    token_ids = None
    if sampling.has_uncoupled:
        token_ids = sample_from_probs(probs, uniforms(seeds, choices, starts, depth, Purpose.DRAFT))
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
