"""Decides, for every request of a step, which drafts stay and which token follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.batch import DraftTokens, SampledTokens, ScheduledBatch
from outrider.sampling import Purpose, compute_probs, gumbel_noise, uniforms
from outrider.spec_decode.output_logprobs import OutputLogprobs
from outrider.spec_decode.request_sampling import (
    RequestSampling,
    SamplingDefaults,
    greedy_token_ids,
)
from outrider.spec_decode.sampled_windows import SampledWindows
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

    from outrider.logprobs import TokenLogprobs
    from outrider.request import Request


class RejectionSampler:
    """The third word of the step.

    Args:
        defaults: rule and vocabulary.
    """

    def __init__(self, defaults: SamplingDefaults) -> None:
        self._defaults = defaults

    def __call__(self, batch: ScheduledBatch, logits: Tensor) -> SampledTokens:
        """Verifies the drafts of a batch. Ends with the one host sync of a step.

        Args:
            batch: what ran.
            logits: [R, V], for each request that samples one row per draft and one more, in the
                order of the batch.
        """
        windows = SampledWindows.of(batch, self._defaults)
        if windows is None:
            size = len(batch.requests)
            zeros, nothing = [0] * size, [()] * size
            return SampledTokens(zeros, nothing, [False] * size, zeros, zeros, [None] * size)
        if windows.gathered.is_greedy:
            mask = self._defaults.allowed_mask
            target = greedy_token_ids(logits, mask, windows.processors())
            result = greedy_verify(windows.draft_ids, target[windows.rows])
        else:
            result = self._verify(windows, logits)
        logprobs = OutputLogprobs.of(windows, logits, result.output_token_ids, self._defaults)
        return _on_host(len(batch.requests), windows, result, logprobs, batch.drafts)

    def _verify(self, windows: SampledWindows, logits: Tensor) -> VerifyResult:
        """Applies each request's rule."""
        gathered, draft_probs = windows.gathered, windows.draft_probs
        params = gathered.params.rows(windows.owners())
        probs = compute_probs(logits, params, windows.processors())[windows.rows]
        rules = [self._defaults.rule(request) for request in windows.requests]
        results = []
        for rule in sorted(set(rules)):
            members = torch.tensor(
                [i for i, r in enumerate(rules) if r == rule], device=logits.device
            )
            result = _verify(
                rule,
                windows.draft_ids[members],
                None if draft_probs is None else draft_probs[members],
                probs[members],
                _keys(gathered, windows.requests, members),
            )
            results.append((members, result))
        return _merge(results, len(rules))


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
    size: int,
    windows: SampledWindows,
    result: VerifyResult,
    window_logprobs: OutputLogprobs | None,
    drafts: DraftTokens | None,
) -> SampledTokens:
    """Brings the decision to the host: the only place where every step waits for the device."""
    doubts = torch.zeros_like(result.num_accepted_tokens)
    if drafts is not None and drafts.is_unsound is not None:
        doubts = drafts.is_unsound[torch.tensor(windows.members, device=doubts.device)].long()
    accepted, drafted, broken = [0] * size, [0] * size, [False] * size
    outputs: list[list[int]] = [[] for _ in range(size)]
    num_fallbacks, unsound = [0] * size, [False] * size
    logprobs: list[list[TokenLogprobs] | None] = [None] * size
    packed = torch.cat(
        [
            torch.stack(
                [
                    result.num_accepted_tokens,
                    is_leading(windows.draft_ids >= 0).sum(-1),
                    result.is_broken.long(),
                    result.num_fallbacks,
                    doubts,
                ],
                dim=1,
            ),
            result.output_token_ids,
        ],
        dim=1,
    ).tolist()
    of_windows = None if window_logprobs is None else window_logprobs.to_host(len(packed))
    for place, (i, row) in enumerate(zip(windows.members, packed, strict=True)):
        accepted[i], drafted[i], is_broken, num_fallbacks[i], has_unsound, *token_ids = row
        # Those without drafts have the row of some other request there.
        has_drafts = drafts is not None and drafts.num_drafts[i] > 0
        broken[i], unsound[i] = bool(is_broken), has_drafts and bool(has_unsound)
        outputs[i] = [] if is_broken else token_ids[: accepted[i] + 1]
        if of_windows is not None and (entries := of_windows[place]) is not None:
            logprobs[i] = entries[: len(outputs[i])]
    return SampledTokens(accepted, outputs, broken, drafted, num_fallbacks, logprobs, unsound)
