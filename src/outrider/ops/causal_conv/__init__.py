"""Depthwise causal convolution and its rolling window."""

from outrider.ops.causal_conv.conv import causal_conv, roll_window
from outrider.ops.causal_conv.naive import causal_conv_naive

__all__ = ["causal_conv", "causal_conv_naive", "roll_window"]
