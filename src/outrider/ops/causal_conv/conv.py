"""Depthwise causal convolution with a window that can be rolled back.

A request's window is stored un-rolled: the committed columns, then the columns of the last
window's drafts. How many of those were kept is only known a step later, so the next pass reads
the history at that offset (`roll_window`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(columns: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Depthwise convolution over rows that are already preceded by their history.

    Args:
        columns: [b, history + T, channels]; history = (taps - 1) * dilation rows come first.
        weight: [channels, taps]; the last tap is the row itself.
        dilation: distance of two taps in rows.

    Returns:
        [b, T, channels].
    """
    taps = weight.shape[1]
    num_rows = columns.shape[1] - (taps - 1) * dilation
    output = columns[:, :num_rows] * weight[:, 0]
    for tap in range(1, taps):
        start = tap * dilation
        output = torch.addcmul(output, columns[:, start : start + num_rows], weight[:, tap])
    return output


def roll_window(
    window: Tensor, rows: Tensor, num_kept: Tensor, num_certain: Tensor, history: int
) -> tuple[Tensor, Tensor]:
    """Drops the rejected columns of the last window and appends this window's rows.

    Args:
        window: [b, history + P, channels]: committed columns, then pending ones.
        rows: [b, L, channels], the new columns (padding at the end is never read back).
        num_kept: [b] int64, pending columns that were accepted.
        num_certain: [b] int64, rows that are kept for certain; the rest are drafts.
        history: columns a convolution looks back.

    Returns:
        The columns to convolve, [b, history + L, channels], and the window to store,
        [b, history + P, channels].
    """
    width, length = window.shape[1], rows.shape[1]
    requests = torch.arange(window.shape[0], device=window.device)[:, None]
    steps = torch.arange(width, device=window.device)
    past = window if width == history else window[requests, num_kept[:, None] + steps[:history]]
    columns = torch.cat([past, rows], dim=1)
    source = (num_certain[:, None] + steps).clamp_(max=history + length - 1)
    return columns, columns[requests, source]


def windows_after(columns: Tensor, requests: Tensor, num_rows: Tensor, history: int) -> Tensor:
    """The committed windows as they were after some of the rows that were convolved.

    Args:
        columns: [b, history + L, channels], what `roll_window` returned.
        requests: [n] int64, of which of the b each window is.
        num_rows: [n] int64, rows that it has seen, 0..L.
        history: columns a convolution looks back.

    Returns:
        [n, history, channels].
    """
    steps = torch.arange(history, device=columns.device)
    return columns[requests[:, None], num_rows[:, None] + steps]
