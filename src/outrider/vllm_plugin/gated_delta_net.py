"""The delta-net layers: our arithmetic, vLLM's sharded projections, states in slots."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from outrider.models.qwen4_exp.gated_delta_net import GatedDeltaNet
from outrider.ops.gated_delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from outrider.vllm_plugin.recurrent_state import StateLayer, StateWindow, delta_net_parts
from outrider.vllm_plugin.sharding import check_divisible, rows_loader

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from outrider.models.qwen4_exp.config import Qwen4ExpConfig


class ParallelGatedDeltaNet(GatedDeltaNet, StateLayer):
    """A delta net whose heads are divided among the ranks of a tensor-parallel group.

    Args:
        config: of the whole model.
        vllm_config: vLLM's.
        prefix: the layer's name.
    """

    def __init__(self, config: Qwen4ExpConfig, vllm_config: VllmConfig, prefix: str) -> None:
        tp_size = get_tensor_model_parallel_world_size()
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            check_divisible(name, getattr(config, name), tp_size)
        super().__init__(
            replace(
                config,
                linear_num_key_heads=config.linear_num_key_heads // tp_size,
                linear_num_value_heads=config.linear_num_value_heads // tp_size,
            )
        )
        hidden, quant = config.hidden_size, vllm_config.quant_config
        key_dim, value_dim = config.linear_key_dim, config.linear_value_dim
        self.in_proj_qkv = MergedColumnParallelLinear(
            hidden,
            [key_dim, key_dim, value_dim],
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.in_proj_qkv",
            return_bias=False,
        )
        for name, width in (
            ("in_proj_z", value_dim),
            ("in_proj_b", config.linear_num_value_heads),
            ("in_proj_a", config.linear_num_value_heads),
        ):
            layer = ColumnParallelLinear(
                hidden,
                width,
                bias=False,
                quant_config=quant if name == "in_proj_z" else None,
                prefix=f"{prefix}.{name}",
                return_bias=False,
            )
            setattr(self, name, layer)
        self.out_proj = RowParallelLinear(
            value_dim,
            hidden,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.out_proj",
            return_bias=False,
        )
        # Exponents, sums and the convolution: in float32 whatever the model's dtype.
        for name in ("A_log", "dt_bias"):
            self._widen(self, name, sharded_weight_loader(0))
        self._widen(self.conv1d, "weight", rows_loader([key_dim, key_dim, value_dim]))
        self.declare_state(
            vllm_config, prefix, delta_net_parts(config, tp_size, vllm_config.model_config.dtype)
        )

    @staticmethod
    def _widen(module: nn.Module, name: str, loader: object) -> None:
        weight = nn.Parameter(torch.empty(getattr(module, name).shape, dtype=torch.float32))
        set_weight_attrs(weight, {"weight_loader": loader})
        setattr(module, name, weight)

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        """[T, C] to [T, C]; the states are modified."""
        columns = self.in_proj_qkv(hidden)
        decay, beta = self._decay_and_beta(hidden)
        mixed = torch.zeros(
            len(hidden), self.num_value_heads, self.value_head_dim, dtype=torch.float32
        )
        for window in self.windows():
            rows = window.rows
            mixed[rows] = self._mix(window, columns[rows], decay[rows], beta[rows].float())
        return self._output(mixed, hidden)

    def _output(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        """Normalises, gates and projects [T, h, dv] float32 to [T, C]."""
        z = self.in_proj_z(hidden).float().unflatten(-1, (-1, self.value_head_dim))
        gated = self.norm(mixed) * self.gate_activation(z)
        projected: Tensor = self.out_proj(gated.flatten(-2).to(hidden.dtype))
        return projected

    def _mix(self, window: StateWindow, columns: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Rows [b, L, ...] of a window to what each reads, [b, L, h, dv] float32."""
        conv, recurrent = self.states
        history = self.history
        columns = torch.cat([window.read(conv), columns], dim=1)
        state = window.read(recurrent)
        q, k, v = self._heads(columns.float())
        q, k = self._per_value_head(q), self._per_value_head(k)
        length = q.shape[1]
        if not window.keeps_every_row:
            mixed, state = chunk_gated_delta_rule(q, k, v, decay, beta, state)
            slots = window.write_slots[:, 0]
            recurrent[slots] = state
            conv[slots] = columns[:, length:]
            return mixed
        read = []
        for row in range(length):
            one = slice(row, row + 1)
            mixed, state = recurrent_gated_delta_rule(
                q[:, one], k[:, one], v[:, one], decay[:, one], beta[:, one], state
            )
            read.append(mixed)
            slots = window.write_slots[:, row]
            recurrent[slots] = state
            conv[slots] = columns[:, row + 1 : row + 1 + history]
        return torch.cat(read, dim=1)
