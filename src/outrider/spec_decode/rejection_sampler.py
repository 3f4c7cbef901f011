"""Decides, for every request of a step, which drafts stay and which token follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID, DraftTokens, SampledTokens, ScheduledBatch
from outrider.sampling import Purpose, compute_probs, gumbel_noise, uniforms
from outrider.spec_decode.request_sampling import (
    RequestSampling,
    SamplingDefaults,
    greedy_token_ids,
)
from outrider.spec_decode.verify_rules import (
    VerifyResult,
    block_verify,
    coupled_verify,
    greedy_verify,
    standard_verify,
)
from outrider.spec_decode.verify_window import is_leading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.request import Request


class RejectionSampler:
    """The third word of the step.

    Args:
        defaults: rule and vocabulary.
    """

    def __init__(self, defaults: SamplingDefaults) -> None:
        self._defaults = defaults
        self._allowed_mask = defaults.allowed_mask()

    def __call__(self, batch: ScheduledBatch, logits: Tensor) -> SampledTokens:
        """Verifies the drafts of a batch. Ends with the one host sync of a step.

        Args:
            batch: what ran.
            logits: [R, V], for each request that samples one row per draft and one more, in the
                order of the batch.
        """
        sampling = [i for i, is_sampling in enumerate(batch.is_sampling) if is_sampling]
        if not sampling:
            return _on_host(batch, sampling, None, None)
        counts = [batch.spans[i].num_drafts for i in sampling]
        requests = [batch.requests[i] for i in sampling]
        device = logits.device
        num_drafts = torch.tensor(counts, device=device)
        rows = _padded_rows(counts, num_drafts)
        draft_ids, draft_probs = _draft_window(batch.drafts, sampling, num_drafts, max(counts))
        gathered = RequestSampling.from_requests(requests, self._allowed_mask, device)
        if gathered.is_greedy:
            target = greedy_token_ids(logits, self._allowed_mask)
            return _on_host(batch, sampling, draft_ids, greedy_verify(draft_ids, target[rows]))
        owner = torch.repeat_interleave(
            torch.arange(len(counts), device=device), num_drafts + 1, output_size=logits.shape[0]
        )
        probs = compute_probs(logits, gathered.params.rows(owner))[rows]
        rules = [self._defaults.rule(request) for request in requests]
        results = []
        for rule in sorted(set(rules)):
            members = torch.tensor([i for i, r in enumerate(rules) if r == rule], device=device)
            result = _verify(
                rule,
                draft_ids[members],
                None if draft_probs is None else draft_probs[members],
                probs[members],
                _keys(gathered, requests, members),
            )
            results.append((members, result))
        return _on_host(batch, sampling, draft_ids, _merge(results, len(sampling)))


def _keys(
    gathered: RequestSampling, requests: Sequence[Request], members: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, choice and window start of the members, [b] int64 each."""
    starts = torch.tensor([len(r.token_ids) for r in requests], device=members.device)
    return gathered.seeds[members], gathered.choices[members], starts[members]


def _verify(
    rule: str,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
) -> VerifyResult:
    """Draws the random numbers of a rule and applies it."""
    seeds, choices, starts = (key[:, None] for key in keys)
    depths = torch.arange(target_probs.shape[1], device=target_probs.device)
    if rule == "coupled":
        noise = gumbel_noise(seeds, choices, starts + depths, target_probs.shape[-1])
        return coupled_verify(draft_ids, target_probs, noise)
    accept = uniforms(seeds, choices, starts, depths[:-1], Purpose.ACCEPT)
    resample = uniforms(seeds, choices, starts, depths, Purpose.RESAMPLE)
    verify = block_verify if rule == "block" else standard_verify
    return verify(draft_ids, draft_probs, target_probs, accept, resample)


def _padded_rows(counts: Sequence[int], num_drafts: Tensor) -> Tensor:
    """[b, K + 1] row of the logits for each request and depth; surplus depths repeat the last."""
    first = (num_drafts + 1).cumsum(0) - (num_drafts + 1)
    depths = torch.arange(max(counts) + 1, device=num_drafts.device)
    return first[:, None] + torch.minimum(depths, num_drafts[:, None])


def _draft_window(
    drafts: DraftTokens | None, sampling: Sequence[int], num_drafts: Tensor, width: int
) -> tuple[Tensor, Tensor | None]:
    """Draft ids [b, K] with placeholders past the end, and their laws [b, K, V] or None."""
    if drafts is None or width == 0:
        return num_drafts.new_empty(len(sampling), 0), None
    index = torch.tensor(sampling, device=num_drafts.device)
    is_draft = torch.arange(width, device=num_drafts.device) < num_drafts[:, None]
    ids = torch.where(is_draft, drafts.token_ids[index, :width], PLACEHOLDER_TOKEN_ID)
    probs = None if drafts.probs is None else drafts.probs[index, :width]
    return ids, probs


def _merge(results: list[tuple[Tensor, VerifyResult]], size: int) -> VerifyResult:
    """Puts the results of several rules back into the order of the batch."""
    if len(results) == 1:
        return results[0][1]
    order = torch.cat([members for members, _ in results]).argsort()
    assert order.shape[0] == size, "every request is verified by one rule"
    return VerifyResult(
        *(
            torch.cat([getattr(result, name) for _, result in results])[order]
            for name in (
                "num_accepted_tokens",
                "output_token_ids",
                "is_broken",
                "num_fallbacks",
            )
        )
    )


def _on_host(
    batch: ScheduledBatch,
    sampling: Sequence[int],
    draft_ids: Tensor | None,
    result: VerifyResult | None,
) -> SampledTokens:
    """Brings the decision to the host: the only place of a step that waits for the device."""
    size = len(batch.requests)
    accepted, drafted, broken = [0] * size, [0] * size, [False] * size
    outputs: list[list[int]] = [[] for _ in range(size)]
    num_fallbacks = [0] * size
    if result is None or draft_ids is None:
        return SampledTokens(accepted, outputs, broken, drafted, num_fallbacks, [None] * size)
    packed = torch.cat(
        [
            torch.stack(
                [
                    result.num_accepted_tokens,
                    is_leading(draft_ids >= 0).sum(-1),
                    result.is_broken.long(),
                    result.num_fallbacks,
                ],
                dim=1,
            ),
            result.output_token_ids,
        ],
        dim=1,
    ).tolist()
    for i, row in zip(sampling, packed, strict=True):
        accepted[i], drafted[i], is_broken, num_fallbacks[i], *token_ids = row
        broken[i] = bool(is_broken)
        outputs[i] = [] if is_broken else token_ids[: accepted[i] + 1]
    return SampledTokens(accepted, outputs, broken, drafted, num_fallbacks, [None] * size)
