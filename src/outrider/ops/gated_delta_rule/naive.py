"""Reference of the gated delta rule: one row after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_delta_rule_naive(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence row by row (arXiv:2412.06464, equation 10).

        M <- exp(g_t) M;  M <- M + k_t (beta_t (v_t - k_t^T M))^T;  o_t = q_t^T M

    Args:
        q: [b, T, h, dk], normalised and scaled.
        k: [b, T, h, dk], normalised.
        v: [b, T, h, dv].
        g: [b, T, h], log decay, not positive.
        beta: [b, T, h], write strength in (0, 1); 0 together with g = 0 leaves the state as it is.
        state: [b, h, dk, dv], not modified.

    Returns:
        Outputs [b, T, h, dv] and the state after the last row.
    """
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        update = beta[:, t, :, None] * (v[:, t] - read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    if not outputs:
        return v.new_zeros(v.shape), state
    return torch.stack(outputs, dim=1), state
