"""Mixture of experts with one gated shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.ops.moe import gated_product, route, routed_experts, routed_experts_sequence

if TYPE_CHECKING:
    from outrider.batch import MarginProbe
    from outrider.models.qwen4_exp.config import Qwen4ExpConfig


class Experts(nn.Module):
    """The packed weights of all routed experts of a layer."""

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        experts, inner = config.num_experts, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, config.hidden_size, inner))


class SharedExpert(nn.Module):
    """The expert every token passes through."""

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.shared_expert_intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., C] to [..., C]."""
        gated: Tensor = F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(gated)

    def forward_sequence(self, hidden: Tensor) -> Tensor:
        """The same with a gradient in fewer passes over memory."""
        return self.down_proj(gated_product(self.gate_proj(hidden), self.up_proj(hidden)))


class SparseMoeBlock(nn.Module):
    """y = sum_e w_e expert_e(u) + sigmoid(u w_s) shared(u)."""

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = SharedExpert(config)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def _combine(self, hidden: Tensor, routed: Tensor) -> Tensor:
        share = torch.sigmoid(self.shared_expert_gate(hidden))
        return routed + share * self.shared_expert(hidden)

    def forward(self, hidden: Tensor, probe: MarginProbe | None = None) -> Tensor:
        """[T, C] to [T, C]."""
        ids, weights, margin = route(
            self.gate(hidden), self.num_experts_per_tok, normalise=self.normalise
        )
        if probe is not None:
            probe.router.append(margin)
        experts = self.experts
        routed = routed_experts(hidden, ids, weights, experts.gate_up_proj, experts.down_proj)
        return self._combine(hidden, routed)

    def forward_sequence(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, C] to [B, T, C] and the router's logits [B * T, E], differentiable."""
        flat = hidden.flatten(0, 1)
        logits = self.gate(flat)
        ids, weights, _ = route(logits, self.num_experts_per_tok, normalise=self.normalise)
        experts = self.experts
        routed = routed_experts_sequence(
            flat, ids, weights, experts.gate_up_proj, experts.down_proj
        )
        shared = self.shared_expert.forward_sequence(flat)
        share = torch.sigmoid(self.shared_expert_gate(flat))
        return torch.addcmul(routed, share, shared).view_as(hidden), logits
