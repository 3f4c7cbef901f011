"""Depthwise causal convolution and its rolling window."""

from outrider.ops.causal_conv.conv import causal_conv, roll_window, windows_after
from outrider.ops.causal_conv.naive import causal_conv_naive
from outrider.ops.causal_conv.sequence import causal_conv_silu

__all__ = [
    "causal_conv",
    "causal_conv_naive",
    "causal_conv_silu",
    "roll_window",
    "windows_after",
]
