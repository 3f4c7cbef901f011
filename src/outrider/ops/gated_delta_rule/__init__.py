"""Gated delta rule: the recurrence of the delta-net layers."""

from outrider.ops.gated_delta_rule.chunk import (
    CHUNK_SIZE,
    StateProbe,
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)
from outrider.ops.gated_delta_rule.naive import gated_delta_rule_naive
from outrider.ops.gated_delta_rule.sequence import (
    SEQUENCE_CHUNK_SIZE,
    sequence_gated_delta_rule,
)

__all__ = [
    "CHUNK_SIZE",
    "SEQUENCE_CHUNK_SIZE",
    "StateProbe",
    "chunk_gated_delta_rule",
    "gated_delta_rule_naive",
    "recurrent_gated_delta_rule",
    "sequence_gated_delta_rule",
]
