"""The convolution of vLLM's delta nets on the CPU, in a window of fewer than K drafts.

A slot holds taps - 1 columns before a window and those of its 1 + K rows, and the next window reads
from the first row that was kept onwards. vLLM writes the columns up to the END of the slot. In a
window cut short, as structured output, the budget of a step or the end of a context leave it, they
lie too far back: the next window reads columns of other rows, and says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import conv1d, silu

from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def obstacle() -> str | None:
    """Accelerators have kernels of their own."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else "this platform has kernels of its own"


def install() -> None:
    """Takes the batches with such windows; whole ones stay with vLLM."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    replace(gdn_attention, "_spec_forward", _from_the_start)


def _from_the_start(spec_forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def from_the_start(
        layer: Any,
        attn_metadata_i: Any,
        mixed_qkv_spec: Tensor,
        b_spec: Tensor,
        a_spec: Tensor,
        conv_buf: Tensor,
        ssm_state: Tensor,
        width: int,
        state_len: int,
    ) -> Tensor:
        metadata = attn_metadata_i
        num_windows = metadata.num_spec_decodes
        starts = metadata.spec_query_start_loc[: num_windows + 1]
        # A slot has a column for each row of a whole window, but for the first's own taps - 1.
        if bool((starts.diff() == state_len - width + 2).all()):
            return spec_forward(
                layer,
                metadata,
                mixed_qkv_spec,
                b_spec,
                a_spec,
                conv_buf,
                ssm_state,
                width,
                state_len,
            )
        slots = metadata.spec_state_indices_tensor[:num_windows].to(torch.int32)
        num_kept = metadata.num_accepted_tokens[:num_windows].to(torch.int32)
        mixed = convolve(layer, mixed_qkv_spec, conv_buf, starts, slots[:, 0], num_kept, width)
        return _recur(layer, mixed, b_spec, a_spec, ssm_state, starts, slots, num_kept)

    return from_the_start


def convolve(
    layer: Any,
    rows: Tensor,
    slots: Tensor,
    starts: Tensor,
    slot_indices: Tensor,
    num_kept: Tensor,
    width: int,
) -> Tensor:
    """[T, D] rows of n windows after the convolution; their columns go into the slots.

    Args:
        layer: vLLM's delta net.
        rows: [T, D], one window after another.
        slots: [slots, D, columns], modified: the last taps - 1 columns before a window, then those
            of its rows.
        starts: [n + 1] first row of each window, and the end.
        slot_indices: [n].
        num_kept: [n] rows of the last window that were kept, from 1.
        width: taps.
    """
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _unpacked_conv_weight

    weight = _unpacked_conv_weight(layer).unsqueeze(1)
    mixed = torch.empty_like(rows)
    ends = starts.tolist()
    for window, (slot, kept) in enumerate(
        zip(slot_indices.tolist(), num_kept.tolist(), strict=True)
    ):
        own = slice(ends[window], ends[window + 1])
        if own.start == own.stop:
            continue
        before = slots[slot, :, kept - 1 : kept + width - 2]
        columns = torch.cat([before, rows[own].T.to(slots.dtype)], dim=-1)
        convolved = conv1d(columns[None], weight, layer.conv1d.bias, groups=len(columns))[0]
        if layer.activation == "silu":
            convolved = silu(convolved)
        mixed[own] = convolved.T.to(rows.dtype)
        # The first row of the next window has at least one kept row before it.
        slots[slot, :, : columns.shape[1] - 1] = columns[:, 1:]
    return mixed


def _recur(
    layer: Any,
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    states: Tensor,
    starts: Tensor,
    slots: Tensor,
    num_kept: Tensor,
) -> Tensor:
    """The recurrence, by vLLM's kernel, for which windows of any length are right."""
    import vllm._custom_ops as ops

    query, key, value = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(mixed))
    result: Tensor = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query,
        k=key,
        v=value,
        a=a,
        b=b,
        initial_state_source=states,
        spec_state_indices=slots.contiguous(),
        num_accepted_tokens=num_kept.contiguous(),
        cu_seqlens=starts.to(torch.int32).contiguous(),
        use_qk_l2norm_in_kernel=True,
    )
    return result
