"""Gated residual over several streams: the differentiable form that training runs."""

from outrider.ops.hyper_connection.naive import read_streams_naive
from outrider.ops.hyper_connection.sequence import BLOCK_SIZE, inject_streams, read_streams

__all__ = ["BLOCK_SIZE", "inject_streams", "read_streams", "read_streams_naive"]
