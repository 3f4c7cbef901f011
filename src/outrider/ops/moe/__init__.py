"""Mixture of experts: routing and the routed experts."""

from outrider.ops.moe.experts import (
    route,
    routed_experts,
    routed_experts_dense,
    routed_experts_gathered,
    routed_experts_grouped,
)
from outrider.ops.moe.naive import routed_experts_naive
from outrider.ops.moe.sequence import gated_product, routed_experts_sequence

__all__ = [
    "gated_product",
    "route",
    "routed_experts",
    "routed_experts_dense",
    "routed_experts_gathered",
    "routed_experts_grouped",
    "routed_experts_naive",
    "routed_experts_sequence",
]
