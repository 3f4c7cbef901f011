"""Reference of the depthwise causal convolution: one tap, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv_naive(columns: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Depthwise convolution over rows that are already preceded by their history.

    Args:
        columns: [b, history + T, channels]; history = (taps - 1) * dilation rows come first.
        weight: [channels, taps]; the last tap is the row itself.
        dilation: distance of two taps in rows.

    Returns:
        [b, T, channels].
    """
    taps = weight.shape[1]
    history = (taps - 1) * dilation
    outputs = []
    for t in range(history, columns.shape[1]):
        row = torch.zeros_like(columns[:, 0])
        for tap in range(taps):
            row = row + weight[:, tap] * columns[:, t - (taps - 1 - tap) * dilation]
        outputs.append(row)
    return torch.stack(outputs, dim=1) if outputs else columns[:, :0]
