"""The acceptance rules: which drafts a request keeps, and the one token that follows them.

They run after the target's pass over the window, on tensors alone: no state, no random numbers of
their own, no loop over requests, nothing that waits for the device. The README of this folder says
why each rule leaves the target's law as it is. A naive twin, one request at a time, is in
verify_rules_naive.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID
from outrider.sampling import sample_from_probs, sample_with_gumbel
from outrider.spec_decode.verify_window import VerifyWindow, is_law, is_leading


@dataclass(frozen=True)
class VerifyResult:
    """What each of B requests emits.

    Attributes:
        num_accepted_tokens: [B] int64, drafts kept, 0..K; recovered and bonus token not counted.
        output_token_ids: [B, K + 1] int64: the accepted drafts, the recovered or bonus token, then
            PLACEHOLDER_TOKEN_ID. Placeholders alone where `is_broken`.
        is_broken: [B] bool: the first target row is not finite, so there is no law to draw from;
            the request emits nothing and cannot go on.
        num_fallbacks: [B] int64, 0..2: 1 if a row that was not finite cut the window short, and 1
            if the residual of a rejected draft held no mass and the target row was taken instead.
    """

    num_accepted_tokens: Tensor
    output_token_ids: Tensor
    is_broken: Tensor
    num_fallbacks: Tensor


def standard_verify(
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> VerifyResult:
    """Accepts draft by draft, each with probability min(1, target / draft).

    arXiv:2211.17192, Algorithm 1. The first rejection ends the window with a recovered token from
    the normalised max(target - draft, 0).

    Args:
        draft_token_ids: [B, K] int64. PLACEHOLDER_TOKEN_ID where nothing was drawn, only as a
            suffix: the token at the first one comes from the target row itself. A draft that was
            drawn and must not be emitted is left in place; its target probability is 0.
        draft_probs: [B, K, V] float, the laws the drafts were really drawn from, or None where
            they were certain (one-hot).
        target_probs: [B, K + 1, V] float; row i is the law of the token at the place of draft i.
            A row that is 1 at one id (temperature 0) accepts exactly that id.
        accept_uniforms: [B, K] float in (0, 1).
        resample_uniforms: [B, K + 1] float in (0, 1), independent of the former; row i is used if
            the window stops after i drafts.
    """
    window = VerifyWindow.open(draft_token_ids, draft_probs, target_probs)
    is_accepted = accept_uniforms <= standard_acceptance_probs(window)
    num_kept = is_leading(is_accepted).sum(-1)
    return _emit(window, num_kept, None, resample_uniforms)


def block_verify(
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> VerifyResult:
    """Accepts the longest prefix that passes, so that a strong draft can save a weak one before it.

    arXiv:2403.10444, Algorithm 2. A draft that fails does not end the window: the last one whose
    uniform lies under its threshold does. With one-hot drafts no prefix is worth more than its
    drafts one by one, and this is `standard_verify`. With K = 1 the two agree coin for coin.

    Args:
        draft_token_ids: as in `standard_verify`. The last draft that was drawn is the end of the
            block, whatever K is.
        draft_probs: as in `standard_verify`.
        target_probs: as in `standard_verify`.
        accept_uniforms: [B, K] float in (0, 1). All of them are used, those past the place where
            the window stops too, so none may be used again in a later window.
        resample_uniforms: as in `standard_verify`.
    """
    if draft_probs is None:
        return standard_verify(
            draft_token_ids, None, target_probs, accept_uniforms, resample_uniforms
        )
    window = VerifyWindow.open(draft_token_ids, draft_probs, target_probs)
    prefix_ratios = block_prefix_ratios(window)
    is_passed = accept_uniforms <= block_acceptance_thresholds(window, prefix_ratios)
    # The last place that passed: the most that places counted from 1 reach.
    places = torch.arange(1, is_passed.shape[1] + 1, device=is_passed.device)
    num_kept = torch.nn.functional.pad(places * is_passed, (1, 0)).amax(-1)
    return _emit(window, num_kept, prefix_ratios, resample_uniforms)


def coupled_verify(draft_token_ids: Tensor, target_probs: Tensor, gumbel: Tensor) -> VerifyResult:
    """Accepts a draft where it is the token the target itself draws with the noise of that place.

    What is emitted is a function of target and noise alone: plain decoding with the same noise
    gives the same tokens, whatever the drafts were. Drafts drawn with the same noise agree often
    (arXiv:2408.07978).

    Args:
        draft_token_ids: as in `standard_verify`.
        target_probs: [B, K + 1, V] float.
        gumbel: [B, K + 1, V] float, the noise of the position row i decides.
    """
    drawn = sample_with_gumbel(target_probs, gumbel)
    return greedy_verify(draft_token_ids, drawn.where(is_law(target_probs), PLACEHOLDER_TOKEN_ID))


def greedy_verify(draft_token_ids: Tensor, target_argmax: Tensor) -> VerifyResult:
    """Accepts drafts while they equal the target's choice; the first other choice is emitted.

    Args:
        draft_token_ids: as in `standard_verify`.
        target_argmax: [B, K + 1] int64, the target's choice at each row, PLACEHOLDER_TOKEN_ID for
            a row that is not finite.
    """
    num_drafts = draft_token_ids.shape[1]
    is_sound_row = target_argmax >= 0
    is_match = (draft_token_ids == target_argmax[:, :num_drafts]) & is_sound_row[:, :num_drafts]
    num_kept = is_leading(is_match).sum(-1)
    final = target_argmax.gather(-1, num_kept.unsqueeze(-1)).squeeze(-1)
    return _close(draft_token_ids, num_kept, final, is_sound_row, torch.zeros_like(num_kept))


def standard_acceptance_probs(window: VerifyWindow) -> Tensor:
    """[B, K] float: probability with which each draft is kept if those before it were; 0 past."""
    return window.ratios.clamp(max=1)


def block_prefix_ratios(window: VerifyWindow) -> Tensor:
    """[B, K + 1] float: the paper's P_0..P_K, how much the target wants each prefix of the drafts.

    P_0 = 1, P_i = min(1, P_{i-1} * ratio of draft i); 0 past the end of the window.
    """
    prefix_ratios = [window.ratios.new_ones(window.ratios.shape[0])]
    for ratio in window.ratios.unbind(-1):
        prefix_ratios.append((prefix_ratios[-1] * ratio).clamp(max=1))
    return torch.stack(prefix_ratios, -1)


def block_acceptance_thresholds(window: VerifyWindow, prefix_ratios: Tensor) -> Tensor:
    """[B, K] float: the paper's h_1..h_K, under which the uniform of a prefix must lie.

    With Z_i the mass of max(P_i * target - draft, 0) at the row after the prefix, h_i is
    Z_i / (Z_i + 1 - P_i), or 1 where that is 0 / 0. At the last valid draft no draft follows to
    be looked at, and h is P itself; past it h is 0.

    Args:
        window: with `draft_probs`.
        prefix_ratios: [B, K + 1], of `block_prefix_ratios`.
    """
    assert window.draft_probs is not None, "one-hot drafts have no thresholds of their own"
    thresholds = []
    for place in range(1, prefix_ratios.shape[1]):
        prefix_ratio = prefix_ratios[:, place]
        threshold = prefix_ratio
        if place < prefix_ratios.shape[1] - 1:
            mass = residual_weights(
                window.target_probs[:, place], window.draft_probs[:, place], prefix_ratio
            ).sum(-1)
            shortfall = mass + (1 - prefix_ratio)
            ahead = (mass / shortfall).where(shortfall > 0, 1)
            threshold = ahead.where(place < window.num_valid, prefix_ratio)
        thresholds.append(threshold.where(place <= window.num_valid, 0))
    return torch.stack(thresholds, -1) if thresholds else prefix_ratios[:, 1:]


def residual_weights(target_probs: Tensor, draft_probs: Tensor, scale: Tensor | None) -> Tensor:
    """[..., V] float, not normalised: max(scale * target - draft, 0).

    The law of the recovered token: what the target still lacks once every draft that is kept has
    been counted.

    Args:
        target_probs: [..., V].
        draft_probs: [..., V].
        scale: [...], the prefix ratio of the drafts that are kept, or None for 1.
    """
    wanted = target_probs if scale is None else scale.unsqueeze(-1) * target_probs
    return (wanted - draft_probs).clamp_(min=0)


def _emit(
    window: VerifyWindow, num_kept: Tensor, prefix_ratios: Tensor | None, uniforms: Tensor
) -> VerifyResult:
    """Draws the token after the kept drafts: recovered after a rejection, else from the target.

    Args:
        window: of B requests.
        num_kept: [B] int64, drafts that the rule keeps.
        prefix_ratios: [B, K + 1], scale of the target in the residual, or None for 1.
        uniforms: [B, K + 1].
    """
    at_stop = num_kept.unsqueeze(-1)
    weights = window.target_row(num_kept)
    num_fallbacks = torch.zeros_like(num_kept)
    num_drafts = window.token_ids.shape[1]
    if num_drafts:
        scale = None if prefix_ratios is None else prefix_ratios.gather(-1, at_stop).squeeze(-1)
        residual = residual_weights(
            weights, window.draft_row(num_kept.clamp(max=num_drafts - 1)), scale
        )
        is_rejected = num_kept < window.num_valid
        has_mass = residual.sum(-1) > 0
        weights = residual.where((is_rejected & has_mass).unsqueeze(-1), weights)
        num_fallbacks = (is_rejected & ~has_mass).long()
    final = sample_from_probs(weights, uniforms.gather(-1, at_stop).squeeze(-1))

    was_cut = (window.num_valid < window.num_drawn) & window.is_sound_row[:, 0]
    return _close(window.token_ids, num_kept, final, window.is_sound_row, num_fallbacks + was_cut)


def _close(
    draft_token_ids: Tensor,
    num_kept: Tensor,
    final: Tensor,
    is_sound_row: Tensor,
    num_fallbacks: Tensor,
) -> VerifyResult:
    """Puts kept drafts and final token in their places.

    Where the row after the kept drafts is not finite, no token can be drawn from it. The last kept
    draft then stands as the final token: nothing of the law is lost, and the next window begins at
    it and asks the target again. If nothing was kept, the request is broken.

    Args:
        draft_token_ids: [B, K] int64.
        num_kept: [B] int64.
        final: [B] int64, meaningless where the row `num_kept` is not sound.
        is_sound_row: [B, K + 1] bool.
        num_fallbacks: [B] int64, counted so far.
    """
    at_stop = num_kept.unsqueeze(-1)
    is_stopped = ~is_sound_row.gather(-1, at_stop).squeeze(-1)
    is_broken = is_stopped & (num_kept == 0)
    is_shortened = is_stopped & (num_kept > 0)
    num_accepted = num_kept - is_shortened.long()

    row = torch.nn.functional.pad(draft_token_ids, (0, 1), value=PLACEHOLDER_TOKEN_ID)
    row = row.scatter(-1, at_stop, final.where(~is_stopped, PLACEHOLDER_TOKEN_ID).unsqueeze(-1))
    places = torch.arange(row.shape[1], device=row.device)
    is_output = (places <= num_accepted.unsqueeze(-1)) & ~is_broken.unsqueeze(-1)
    return VerifyResult(
        num_accepted_tokens=num_accepted,
        output_token_ids=row.where(is_output, PLACEHOLDER_TOKEN_ID),
        is_broken=is_broken,
        num_fallbacks=num_fallbacks.maximum(is_shortened.long()),
    )
