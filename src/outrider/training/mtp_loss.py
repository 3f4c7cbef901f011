"""The loss of the trunk and of its MTP head, as pure functions of logits and ids.

Called once a training step, after the trunk's pass and the head's unrolled depths.

Alignment, in words. A window of T + 2 ids x_0 .. x_{T+1} trains T rows. Row p of the trunk takes
x_p and predicts x_{p+1}. Row p of the head, at every depth, sits at position p, takes the embedding
of x_{p+1} and predicts x_{p+2}; what differs is the hidden state that goes with it. At depth 0 that
is the trunk's streams X_p, at depth j >= 1 the head's own streams of depth j-1 at row p-1, as in
drafting, where the trunk has not yet seen x_{p+1-j} .. x_{p+1}. A depth-j row with p < j has no
such predecessor and takes no part in the loss.

By example, for the five ids a b c d e (T = 3):

    row      trunk        depth 0          depth 1              depth 2
    p = 0    a -> b       X_0, b -> c      masked               masked
    p = 1    b -> c       X_1, c -> d      Y0_0, c -> d         masked
    p = 2    c -> d       X_2, d -> e      Y0_1, d -> e         Y1_1, d -> e

The chain of one draft window runs down a diagonal: X_0 and b give c, then Y0_0 and c give d, then
Y1_1 and d give e.

Letters: B windows, T rows of a window, V vocabulary, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

# Ids of a window beyond its T rows: the trunk's last target and the head's last target.
NUM_LOOKAHEAD_IDS = 2


def input_ids(window: Tensor) -> Tensor:
    """[B, T+2] int64 -> [B, T]: the ids that the trunk reads, x_p at row p."""
    return window[:, :-2]


def next_ids(window: Tensor) -> Tensor:
    """[B, T+2] int64 -> [B, T]: x_{p+1} at row p, the trunk's target and the head's input."""
    return window[:, 1:-1]


def draft_targets(window: Tensor) -> Tensor:
    """[B, T+2] int64 -> [B, T]: x_{p+2} at row p, the head's target at every depth."""
    return window[:, 2:]


def next_token_loss(logits: Tensor, window: Tensor) -> Tensor:
    """Mean cross entropy of the trunk, in nats.

    Args:
        logits: [B, T, V], any float dtype; the softmax runs in float32 or better.
        window: [B, T+2] int64.
    """
    return _cross_entropy(logits, next_ids(window))


def draft_loss(logits: Tensor, window: Tensor, spec_step_idx: int) -> Tensor:
    """Mean cross entropy of the head at one depth, in nats, over the rows p >= spec_step_idx.

    Args:
        logits: [B, T, V], the head's logits at this depth.
        window: [B, T+2] int64.
        spec_step_idx: the depth, 0-based.
    """
    return _cross_entropy(logits[:, spec_step_idx:], draft_targets(window)[:, spec_step_idx:])


def weighted_depth_loss(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Combines the losses by depth, weights normalised to one (FastMTP, arXiv:2509.18362).

    An early depth matters more: a draft is only ever reached if all before it were accepted.
    """
    if len(losses) != len(weights):
        raise ValueError(f"{len(losses)} depths but {len(weights)} weights")
    total = torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum()
    return total / sum(weights)


def load_balancing_loss(router_logits: Sequence[Tensor], num_experts_per_tok: int) -> Tensor:
    """Router balancing loss, mean over layers: 1 at equal shares, E / k where k experts get all.

    For each layer E / k * sum_e f_e P_e, f_e the fraction of tokens that chose expert e and P_e its
    mean probability (arXiv:2101.03961, equation 4, for k choices a token). Only P carries a
    gradient.

    Args:
        router_logits: one [N, E] a layer.
        num_experts_per_tok: k.
    """
    losses = []
    for logits in router_logits:
        probs = torch.softmax(logits.float(), dim=-1)
        chosen = probs.topk(num_experts_per_tok, dim=-1).indices
        num_experts = probs.shape[-1]
        fraction = (
            torch.bincount(chosen.flatten(), minlength=num_experts).to(probs.dtype) / probs.shape[0]
        )
        losses.append(num_experts / num_experts_per_tok * (fraction * probs.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def draft_agreement(trunk_logits: Tensor, head_logits: Sequence[Tensor]) -> list[Tensor]:
    """Where the head's argmax is the trunk's, by depth: acceptance at temperature 0.

    The trunk's opinion on x_{p+2} stands in its row p+1, so the last row of the head has nothing to
    be compared with.

    Args:
        trunk_logits: [B, T, V].
        head_logits: one [B, T, V] a depth.

    Returns:
        One [B, T-1] bool a depth; rows p < depth are False.
    """
    target = trunk_logits.argmax(dim=-1)[:, 1:]
    agreements = []
    for depth, logits in enumerate(head_logits):
        agreement = logits[:, :-1].argmax(dim=-1) == target
        agreement[:, :depth] = False
        agreements.append(agreement)
    return agreements


def num_chained(agreements: Sequence[Tensor]) -> Tensor:
    """Drafts accepted from each row on, teacher-forced: agreement along the diagonal until it ends.

    Args:
        agreements: one [B, R] bool a depth, as `draft_agreement` gives them.

    Returns:
        [B, R-K+1] int64 for K depths: the rows whose whole diagonal is inside.
    """
    num_rows = agreements[0].shape[1] - len(agreements) + 1
    diagonal = torch.stack(
        [agreement[:, depth : depth + num_rows] for depth, agreement in enumerate(agreements)]
    )
    return diagonal.long().cumprod(dim=0).sum(dim=0)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(
        flat if flat.dtype == torch.float64 else flat.float(), targets.reshape(-1)
    )
