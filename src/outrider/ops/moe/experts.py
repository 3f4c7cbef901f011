"""Routed experts, for few rows and for many."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(
    logits: Tensor, num_experts_per_token: int, *, normalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses the experts of each row; of equal probabilities the lowest expert wins.

    Args:
        logits: [T, E].
        num_experts_per_token: k.
        normalise: divide the chosen probabilities by their sum.

    Returns:
        expert_ids [T, k] int64, weights [T, k] in the dtype of `logits`, and the margin [T]
        between the last chosen and the first refused probability (infinite if k = E).
    """
    probs = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, :num_experts_per_token]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if num_experts_per_token < logits.shape[-1]:
        margin = ordered[:, num_experts_per_token - 1] - ordered[:, num_experts_per_token]
    else:
        margin = torch.full_like(ordered[:, 0], torch.inf)
    return order[:, :num_experts_per_token], weights.to(logits.dtype), margin


def routed_experts_gathered(
    hidden: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Reads each row's experts by a gather: no host sync, cheap while rows are few.

    Args and result as in `routed_experts_naive`.
    """
    num_rows, k = expert_ids.shape
    flat = expert_ids.reshape(-1)
    inputs = hidden.repeat_interleave(k, dim=0)[:, :, None]
    gate, up = (gate_up[flat] @ inputs).chunk(2, dim=1)
    outputs = (down[flat] @ (F.silu(gate) * up)).view(num_rows, k, -1)
    return (outputs * weights[..., None]).sum(1)


def routed_experts_grouped(
    hidden: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Sorts rows by expert and runs each expert once over its rows: for many rows.

    Differentiable. Args and result as in `routed_experts_naive`.
    """
    k = expert_ids.shape[1]
    order = expert_ids.reshape(-1).argsort(stable=True)
    counts = torch.bincount(expert_ids.reshape(-1), minlength=gate_up.shape[0]).tolist()
    source = order // k
    pieces = []
    for expert, rows in enumerate(hidden[source].split(counts)):
        gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)
        pieces.append(F.linear(F.silu(gate) * up, down[expert]))
    outputs = torch.cat(pieces) * weights.reshape(-1)[order][:, None]
    return outputs.new_zeros(hidden.shape).index_add(0, source, outputs)


def routed_experts(
    hidden: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Routed experts; picks the cheaper of the two forms by the number of rows.

    Args and result as in `routed_experts_naive`.
    """
    # A gather copies k experts a row; past this it moves more than every expert once.
    if expert_ids.numel() <= 2 * gate_up.shape[0]:
        return routed_experts_gathered(hidden, expert_ids, weights, gate_up, down)
    return routed_experts_grouped(hidden, expert_ids, weights, gate_up, down)
