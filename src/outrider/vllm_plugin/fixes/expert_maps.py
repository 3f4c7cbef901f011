"""Expert parallelism on the CPU: ids of experts are global, weights are those of a rank.

vLLM hands its kernel the global ids with the local weights, and the kernel reads past their end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def obstacle() -> str | None:
    """Kernels of accelerators take the map themselves."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else "this platform's kernels know the map"


def install() -> None:
    """Wraps the experts of unquantised weights, from which those of each CPU inherit."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    replace(CPUUnquantizedExperts, "apply", _with_local_ids)


def _with_local_ids(apply: Callable[..., None]) -> Callable[..., None]:
    def with_local_ids(
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        *others: Any,
        **options: Any,
    ) -> None:
        if expert_map is None:
            is_here = None
        else:
            local_ids = expert_map[topk_ids.long()].to(topk_ids.dtype)
            is_here = local_ids >= 0
            # Another rank adds what its experts say; here some expert says it with weight 0.
            topk_ids = local_ids.clamp(min=0)
            topk_weights = topk_weights.where(is_here, 0)
        apply(
            self,
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            expert_map,
            *others,
            **options,
        )
        if is_here is not None:
            # Weights that were applied to the input do not take an expert out.
            output.masked_fill_(~is_here.any(-1, keepdim=True), 0)

    return with_local_ids
