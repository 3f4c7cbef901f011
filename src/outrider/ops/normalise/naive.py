"""References of the normalised rows: the formulas as they are written."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unit_rows_naive(x: Tensor, eps: float) -> Tensor:
    """X / sqrt(sum x^2 + eps) over the last dimension of [..., D]."""
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def rms_rows_naive(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    """X / sqrt(mean x^2 + eps) * factor over the last dimension of [..., D], [D]."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * factor


def gated_rms_rows_naive(
    x: Tensor, factor: Tensor, gate: Tensor, eps: float, *, is_silu: bool
) -> Tensor:
    """The same times silu or sigmoid of the gate, [..., D]."""
    activated = F.silu(gate) if is_silu else torch.sigmoid(gate)
    return rms_rows_naive(x, factor, eps) * activated
