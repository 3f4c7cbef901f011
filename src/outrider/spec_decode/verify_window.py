"""The window that an acceptance rule judges: which drafts count, and how likely each one was.

First half of a rule; the second half, what is accepted and drawn, is in verify_rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VerifyWindow:
    """Drafts of B requests with the laws they were drawn from and are judged by.

    Draft i (0-based) was drawn from `draft_probs[:, i]` and is judged by `target_probs[:, i]`. The
    valid drafts of a request are the first `num_valid`: the window ends at the first place where
    nothing was drawn, where the draft's law is broken, or where the row that would judge it is.
    What lies past the end is never read for its value.

    Attributes:
        token_ids: [B, K] int64, in [0, V); 0 where the draft is not a token.
        num_drawn: [B] int64, drafts in front of the first placeholder.
        num_valid: [B] int64, 0..num_drawn.
        ratios: [B, K] float, target over draft probability of each draft; 0 past the end.
        draft_probs: [B, K, V], or None where every draft was certain (one-hot).
        target_probs: [B, K + 1, V].
        is_sound_row: [B, K + 1] bool, False where a target row is not a law: its sum is not finite
            or not positive.
    """

    token_ids: Tensor
    num_drawn: Tensor
    num_valid: Tensor
    ratios: Tensor
    draft_probs: Tensor | None
    target_probs: Tensor
    is_sound_row: Tensor

    @classmethod
    def open(
        cls, draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor
    ) -> VerifyWindow:
        """Gathers what the rules need of each draft.

        Args:
            draft_token_ids: [B, K] int64; outside [0, V) nothing was drawn, nor after it.
            draft_probs: [B, K, V] float, or None.
            target_probs: [B, K + 1, V] float.
        """
        batch_size, num_drafts = draft_token_ids.shape
        vocab_size = target_probs.shape[-1]
        assert target_probs.shape == (batch_size, num_drafts + 1, vocab_size), "not one row more"
        assert draft_probs is None or draft_probs.shape == (batch_size, num_drafts, vocab_size), (
            "not one law for each draft"
        )
        is_drawn = is_leading((draft_token_ids >= 0) & (draft_token_ids < vocab_size))
        token_ids = draft_token_ids.where(is_drawn, 0)
        is_sound_row = is_law(target_probs)

        at_draft = token_ids.unsqueeze(-1)
        ratios = target_probs[:, :num_drafts].gather(-1, at_draft).squeeze(-1)
        is_valid = is_drawn & is_sound_row[:, :num_drafts]
        if draft_probs is not None:
            drawn_with = draft_probs.gather(-1, at_draft).squeeze(-1)
            # A draft that its own law excludes was not drawn from it.
            is_valid = is_valid & is_law(draft_probs) & (drawn_with > 0)
            # Finite, so that a prefix of ratio 0 stays at 0 whatever comes after it.
            ratios = (ratios / drawn_with).clamp(max=torch.finfo(ratios.dtype).max)
        is_valid = is_leading(is_valid)
        return cls(
            token_ids=token_ids,
            num_drawn=is_drawn.sum(-1),
            num_valid=is_valid.sum(-1),
            ratios=ratios.where(is_valid, 0),
            draft_probs=draft_probs,
            target_probs=target_probs,
            is_sound_row=is_sound_row,
        )

    def target_row(self, row: Tensor) -> Tensor:
        """[B, V]: target law at `row` [B] int64 of each request."""
        return self.target_probs[_arange_like(row), row]

    def draft_row(self, row: Tensor) -> Tensor:
        """[B, V]: law of draft `row` [B] int64, in 0..K - 1, of each request."""
        if self.draft_probs is not None:
            return self.draft_probs[_arange_like(row), row]
        one_hot = torch.zeros_like(self.target_probs[:, 0])
        return one_hot.scatter_(-1, self.token_ids.gather(-1, row.unsqueeze(-1)), 1)


def is_law(probs: Tensor) -> Tensor:
    """[..., V] to [...] bool: the row holds mass, and only finite numbers."""
    total = probs.sum(-1)
    return total.isfinite() & (total > 0)


def is_leading(flags: Tensor) -> Tensor:
    """[B, K] bool to [B, K] bool: True up to the first False of the row."""
    return flags.long().cumprod(-1).bool()


def _arange_like(row: Tensor) -> Tensor:
    """[B] int64 counting the requests, on the device of `row`."""
    return torch.arange(row.shape[0], device=row.device)
