"""Mixture of experts: routing and the routed experts."""

from outrider.ops.moe.experts import (
    route,
    routed_experts,
    routed_experts_dense,
    routed_experts_gathered,
    routed_experts_grouped,
)
from outrider.ops.moe.naive import routed_experts_naive

__all__ = [
    "route",
    "routed_experts",
    "routed_experts_dense",
    "routed_experts_gathered",
    "routed_experts_grouped",
    "routed_experts_naive",
]
