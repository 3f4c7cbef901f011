"""Experts that are divided among ranks: what the ranks add up to is what one rank computes."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from outrider.vllm_plugin import register

pytestmark = pytest.mark.vllm

NUM_TOKENS, HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 7, 32, 64, 6, 2


class Case:
    """Weights of all experts, rows, and which experts they chose."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.w1 = 0.2 * torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, generator=generator)
        self.w2 = 0.2 * torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=generator)
        self.hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
        chosen = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(NUM_CHOSEN)
        self.weights, self.ids = chosen.values, chosen.indices.int()

    def apply(self, apply: Any, experts: slice, expert_map: Tensor | None) -> Tensor:
        """What a rank computes that has some of the experts."""
        from vllm._custom_ops import cpu_prepack_moe_weight
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        rank = object.__new__(CPUUnquantizedExperts)
        rank._use_zentorch = False
        rank.quant_config = SimpleNamespace(w1_bias=None, w2_bias=None)
        output = torch.full_like(self.hidden, torch.nan)
        apply(
            rank,
            output,
            self.hidden,
            cpu_prepack_moe_weight(self.w1[experts].clone(), "vec"),
            cpu_prepack_moe_weight(self.w2[experts].clone(), "vec"),
            self.weights,
            self.ids,
            MoEActivation.SILU,
            NUM_EXPERTS,
            expert_map,
            None,
            None,
            torch.empty(0),
            torch.empty(0),
            None,
            False,
        )
        return output

    def naive(self) -> Tensor:
        output = torch.zeros_like(self.hidden)
        for token in range(NUM_TOKENS):
            for weight, expert in zip(self.weights[token], self.ids[token], strict=True):
                gate, up = (self.w1[expert] @ self.hidden[token]).chunk(2)
                output[token] += weight * (self.w2[expert] @ (silu(gate) * up))
        return output


def expert_map(first: int, end: int) -> Tensor:
    """[E] int32: the place of each expert on the rank that has those from first to end."""
    places = torch.arange(NUM_EXPERTS, dtype=torch.int32) - first
    return places.where((places >= 0) & (places < end - first), -1)


def test_ranks_add_up_to_the_whole() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.platforms import current_platform

    register()
    current_platform.import_kernels()
    case, apply = Case(), CPUUnquantizedExperts.apply
    whole = case.apply(apply, slice(None), None)
    torch.testing.assert_close(whole, case.naive(), atol=1e-5, rtol=1e-5)
    bounds = ((0, 2), (2, 5), (5, 6))
    parts = [case.apply(apply, slice(*bound), expert_map(*bound)) for bound in bounds]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, atol=1e-5, rtol=1e-5)


UPSTREAM = """
import sys
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.platforms import current_platform
from tests.vllm_plugin.fixes.test_expert_maps import Case, expert_map

current_platform.import_kernels()
apply = CPUUnquantizedExperts.apply
case = Case()
parts = [case.apply(apply, slice(*b), expert_map(*b)) for b in ((0, 3), (3, 6))]
sys.exit(0 if (sum(parts) - case.naive()).abs().max() < 1e-3 else 3)
"""


def test_upstream_reads_past_the_weights() -> None:
    """It may end the process, so it has one of its own."""
    ended = subprocess.run([sys.executable, "-c", UPSTREAM], capture_output=True, check=False)
    assert ended.returncode == 3 or ended.returncode < 0, ended.stderr.decode()
