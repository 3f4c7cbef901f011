"""vLLM's flat rows of a verify pass as the windows that this package's rules judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from outrider.batch import PLACEHOLDER_TOKEN_ID

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VerifyRows:
    """The windows of B requests with up to K drafts each, over V + 1 ids.

    A placeholder among vLLM's drafts stands for one that was drawn and then found invalid, so it
    is a rejection and not a void: the token comes from the residual. Its own id is lost, and the id
    V takes its place: the target never emits it, and its draft law holds it, as the
    rules expect of a draft that was drawn. No other row knows it.

    Attributes:
        num_drafts: drafts of each request.
        draft_token_ids: [B, K] int64; placeholders past the end.
        draft_probs: [B, K, V + 1] float32.
        target_probs: [B, K + 1, V + 1] float32; the row after the last draft is one-hot at the
            bonus token, which is drawn already.
        target_argmax: [B, K + 1] int64, the bonus token in the row after the last draft.
    """

    num_drafts: list[int]
    draft_token_ids: Tensor
    draft_probs: Tensor
    target_probs: Tensor
    target_argmax: Tensor

    @classmethod
    def gather(
        cls,
        draft_token_ids: Tensor,
        num_drafts: list[int],
        draft_probs: Tensor,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
    ) -> VerifyRows:
        """Pads the rows of each request to the longest.

        Args:
            draft_token_ids: [T] int, the T drafts of all requests one after another.
            num_drafts: drafts of each of B requests, T in all.
            draft_probs: [T, V] float32, the laws they were drawn from.
            target_logits: [T, V] float32, after all that the request's parameters do to them.
            bonus_token_ids: [B, 1] int, what the target draws after the last draft.
        """
        device, vocab_size = target_logits.device, target_logits.shape[-1]
        counts = torch.tensor(num_drafts, device=device)
        places = torch.arange(max(num_drafts) + 1, device=device)
        is_draft = places[:-1] < counts[:, None]
        is_bonus = places == counts[:, None]

        ids = draft_token_ids.new_full(is_draft.shape, PLACEHOLDER_TOKEN_ID, dtype=torch.int64)
        ids[is_draft] = draft_token_ids.long()
        is_invalid = is_draft & (ids < 0)
        laws = draft_probs.new_zeros(*is_draft.shape, vocab_size + 1)
        laws[is_draft] = pad(draft_probs, (0, 1))
        laws[..., vocab_size] = is_invalid.to(laws.dtype)

        is_judged = pad(is_draft, (0, 1))
        bonus = bonus_token_ids.flatten().long()
        target = target_logits.new_zeros(*is_bonus.shape, vocab_size + 1, dtype=torch.float32)
        target[is_judged] = pad(target_logits.softmax(-1, dtype=torch.float32), (0, 1))
        target[is_bonus, bonus] = 1
        argmax = torch.zeros_like(is_bonus, dtype=torch.int64)
        argmax[is_judged] = target_logits.argmax(-1)
        argmax[is_bonus] = bonus
        return cls(
            num_drafts=num_drafts,
            draft_token_ids=ids.where(~is_invalid, vocab_size),
            draft_probs=laws,
            target_probs=target,
            target_argmax=argmax,
        )

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.target_probs.device
