"""Speculative decoding: draft ahead, verify in one pass, keep what the target would have said."""

from outrider.spec_decode.metrics import SpecDecodeMetrics, SpecDecodeStats
from outrider.spec_decode.verify_rules import (
    VerifyResult,
    block_verify,
    coupled_verify,
    greedy_verify,
    standard_verify,
)

__all__ = [
    "SpecDecodeMetrics",
    "SpecDecodeStats",
    "VerifyResult",
    "block_verify",
    "coupled_verify",
    "greedy_verify",
    "standard_verify",
]
