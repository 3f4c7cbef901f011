"""Reference of the routed experts: one row, one expert at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def routed_experts_naive(
    hidden: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """sum_e w_e Wdown_e (silu(gate_e u) * up_e u) for each row.

    Args:
        hidden: [T, C].
        expert_ids: [T, k] int64.
        weights: [T, k].
        gate_up: [E, 2I, C], gate rows then up rows.
        down: [E, C, I].

    Returns:
        [T, C].
    """
    rows = []
    for t in range(hidden.shape[0]):
        total = torch.zeros_like(hidden[t])
        for expert, weight in zip(expert_ids[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[expert] @ hidden[t]).chunk(2)
            total = total + weight * (down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(hidden)
