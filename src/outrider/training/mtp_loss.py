"""The losses of the trunk and of its MTP head, as pure functions of logits and ids.

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

Cross entropy asks the head for the id of the text. The two other losses ask it for the trunk's
whole law of that id, which stands in the trunk's row p+1: both that row and row p of the head speak
of x_{p+2}. The head's last row, T-1, has no such partner and takes no part.

    row      head speaks of    at depths    the trunk's law of it
    p = 0    c                 0            row 1, which has read a b
    p = 1    d                 0, 1         row 2, which has read a b c
    p = 2    e                 0, 1, 2      row 3 is outside: only cross entropy counts it

Worked through at depth 0, for a vocabulary of two ids. The trunk's law is (3/4, 1/4) in row 1 and
(1/2, 1/2) in row 2; the head's is (1/2, 1/2) in row 0 and (1/4, 3/4) in row 1.

    row      forward KL(trunk || head)                        total variation
    p = 0    3/4 log(3/2) + 1/4 log(1/2) = 0.1308             (1/4 + 1/4) / 2 = 1/4
    p = 1    1/2 log 2    + 1/2 log(2/3) = 0.1438             (1/4 + 1/4) / 2 = 1/4
    mean     0.1373                                           0.25

So of the drafts sampled at temperature 1 three quarters would be accepted, and with lambda = 1/2
the LK loss is 0.1937.

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
    return _cross_entropies(logits, next_ids(window)).mean()


def draft_loss(
    logits: Tensor, window: Tensor, spec_step_idx: int, mask: Tensor | None = None
) -> Tensor:
    """Mean cross entropy of the head at one depth, in nats, over the rows p >= spec_step_idx.

    Args:
        logits: [B, T, V], the head's logits at this depth.
        window: [B, T+2] int64.
        spec_step_idx: the depth, 0-based.
        mask: [B, T] bool, the rows that count; None is all of them.
    """
    rows = slice(spec_step_idx, None)
    by_row = _cross_entropies(logits[:, rows], draft_targets(window)[:, rows])
    return _masked_mean(by_row, mask, rows)


def draft_kl(
    trunk_logits: Tensor, logits: Tensor, spec_step_idx: int, mask: Tensor | None = None
) -> Tensor:
    """Mean forward KL(trunk || head) at one depth, in nats, over p >= spec_step_idx but the last.

    Forward: where the trunk puts mass the head must put some, so it learns the whole law.

    Args:
        trunk_logits: [B, T, V]; row p+1 is compared with the head's row p. Without a gradient.
        logits: [B, T, V], the head's logits at this depth.
        spec_step_idx: the depth, 0-based.
        mask: [B, T] bool, rows of the head that count; None is all of them.
    """
    rows = slice(spec_step_idx, -1)
    by_row = _kl(*_facing_log_probs(trunk_logits, logits, rows))
    return _masked_mean(by_row, mask, rows)


def draft_lk(
    trunk_logits: Tensor,
    logits: Tensor,
    spec_step_idx: int,
    lk_lambda: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Mean of lambda KL + (1 - lambda) TV at one depth (LK, arXiv:2602.23881), rows as `draft_kl`.

    TV is half the L1 distance of the two laws: the probability that a draft sampled at temperature
    1 is rejected (arXiv:2211.17192, Corollary 3.6), so its gradient goes where acceptance is lost.
    Far from the trunk that gradient is weak, and KL leads.

    Args:
        trunk_logits: [B, T, V]; row p+1 is compared with the head's row p. Without a gradient.
        logits: [B, T, V], the head's logits at this depth.
        spec_step_idx: the depth, 0-based.
        lk_lambda: the weight of KL, 0 to 1.
        mask: [B, T] bool, rows of the head that count; None is all of them.
    """
    rows = slice(spec_step_idx, -1)
    facing = _facing_log_probs(trunk_logits, logits, rows)
    by_row = lk_lambda * _kl(*facing) + (1.0 - lk_lambda) * _total_variation(*facing)
    return _masked_mean(by_row, mask, rows)


def draft_acceptance(
    trunk_logits: Tensor, logits: Tensor, spec_step_idx: int, mask: Tensor | None = None
) -> Tensor:
    """Mean of 1 - TV at one depth: sampled drafts accepted at temperature 1, rows as `draft_kl`.

    Of those that are looked at, under the rule "standard" and where all before were accepted.

    Args:
        trunk_logits: [B, T, V]; row p+1 is compared with the head's row p.
        logits: [B, T, V], the head's logits at this depth.
        spec_step_idx: the depth, 0-based.
        mask: [B, T] bool, rows of the head that count; None is all of them.
    """
    rows = slice(spec_step_idx, -1)
    by_row = 1.0 - _total_variation(*_facing_log_probs(trunk_logits, logits, rows))
    return _masked_mean(by_row, mask, rows)


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


def _cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """[B, R, V] and [B, R] int64 to [B, R] nats."""
    flat = _at_least_float32(logits).flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), reduction="none").view_as(targets)


def _facing_log_probs(trunk_logits: Tensor, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Log probabilities of trunk and head of the same ids, [B, R, V] each, for rows of the head."""
    target = _at_least_float32(trunk_logits[:, 1:][:, rows.start :].detach())
    return target.log_softmax(dim=-1), _at_least_float32(logits[:, rows]).log_softmax(dim=-1)


def _kl(target_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    return F.kl_div(log_probs, target_log_probs, reduction="none", log_target=True).sum(dim=-1)


def _total_variation(target_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    return 0.5 * (target_log_probs.exp() - log_probs.exp()).abs().sum(dim=-1)


def _masked_mean(by_row: Tensor, mask: Tensor | None, rows: slice) -> Tensor:
    """Mean of [B, R] over the rows that count; 0 where none does."""
    if mask is None:
        return by_row.mean() if by_row.numel() else by_row.sum()
    counted = mask[:, rows]
    return by_row.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
