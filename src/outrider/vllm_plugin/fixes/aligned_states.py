"""Recurrent states at block boundaries, for a prefix cache beside drafts, on the CPU.

With both, vLLM moves states by two Triton kernels that have no replacement for the CPU: the state
that a request goes on from into the block it writes next, and the state at the last boundary that
its kept tokens reached into the block that the cache shares. Without Triton the first step fails.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_INT32_BYTES = 4


def obstacle() -> str | None:
    """Where Triton runs, its kernels do."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return None if current_platform.is_cpu() and not HAS_TRITON else "Triton's kernels run"


def install() -> None:
    """Replaces the two launches of a V1 runner."""
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    replace(MambaSpecDecodeGPUContext, "run_fused_precopy", _before_a_step)
    replace(MambaSpecDecodeGPUContext, "run_fused_postprocess", _after_a_step)


def _before_a_step(_: Callable[..., None]) -> Callable[..., None]:
    def before_a_step(
        self: Any,
        num_reqs: int,
        state_idx_gpu: Tensor,
        src_col_gpu: Tensor,
        token_bias_gpu: Tensor,
        idx_mapping: Tensor | None,
    ) -> None:
        assert idx_mapping is None, "the V1 runner's requests are in the order of the batch"
        if not self.is_initialized:
            return
        columns = (tensor[:num_reqs].tolist() for tensor in (state_idx_gpu, src_col_gpu))
        copy = StateCopy.of(self)
        for request, (target, source, bias) in enumerate(
            zip(*columns, token_bias_gpu[:num_reqs].tolist(), strict=True)
        ):
            # Below 0 there is no state yet.
            if source >= 0 and source != target:
                copy(request, source, target, bias)

    return before_a_step


def _after_a_step(_: Callable[..., None]) -> Callable[..., None]:
    def after_a_step(
        self: Any,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        mamba_state_idx_gpu: Tensor,
        num_scheduled_tokens_gpu: Tensor,
        num_computed_tokens_gpu: Tensor,
        num_draft_tokens_gpu: Tensor,
    ) -> None:
        if not self.is_initialized:
            return
        kept = num_accepted_tokens_gpu[:num_reqs]
        first = (num_computed_tokens_gpu + num_scheduled_tokens_gpu - num_draft_tokens_gpu)[
            :num_reqs
        ]
        # Tokens whose states are kept: from `first` with the first row to `first + kept - 1`.
        boundary = (first + kept - 1) // self.block_size * self.block_size
        target = boundary // self.block_size - 1
        source = mamba_state_idx_gpu[:num_reqs]
        is_reached = boundary >= first
        # A boundary in the block that the request goes on from is where it goes on.
        self.num_accepted_tokens_out[:num_reqs] = kept.where(source != target, 1)
        copy = StateCopy.of(self)
        for request in is_reached.nonzero().flatten().tolist():
            bias = int(boundary[request] - first[request])
            copy(request, int(source[request]), int(target[request]), bias)

    return after_a_step


@dataclass(frozen=True)
class StateCopy:
    """Copies every state of a request from one block of its table to another.

    A state of matrices is the one after a row, and each row of the last window has a block: the
    copy takes the block of the row. A state of a convolution has the columns of the window in one
    block: the copy leaves out the first ones.

    Attributes:
        context: vLLM's, with the addresses and sizes of the states.
        states: of each state: its address, bytes from block to block, bytes of an element,
            elements of a column (or of all), columns (0 for matrices), its group of the cache, and
            rows and bytes from row to row of a convolution whose channels come first.
    """

    context: Any
    states: list[tuple[int, ...]]

    @classmethod
    def of(cls, context: Any) -> StateCopy:
        """Reads the sizes that vLLM has gathered."""
        columns = (
            context.state_base_addrs,
            context.state_block_strides,
            context.state_elem_sizes,
            context.state_inner_sizes,
            context.state_conv_widths,
            context.state_group_indices,
            context.state_dim_row_count,
            context.state_dim_row_stride,
        )
        return cls(context, list(zip(*(column.tolist() for column in columns), strict=True)))

    def __call__(self, request: int, source: int, target: int, bias: int) -> None:
        """Copies the states after row `bias` (from 0) of the last window.

        Args:
            request: row of the block tables.
            source: column of the block that the last window was read from.
            target: column of the block to write.
            bias: rows of the last window before the one whose state is wanted.
        """
        if source == target and bias == 0:
            return
        for base, stride, size, inner, width, group, num_rows, row_bytes in self.states:
            start = base + self._block(group, request, target) * stride
            if width == 0:
                found = base + self._block(group, request, source + bias) * stride
                ctypes.memmove(start, found, inner * size)
                continue
            found = base + self._block(group, request, source) * stride + bias * inner * size
            num_bytes = (width - bias) * inner * size
            for row in range(max(num_rows, 1)):
                ctypes.memmove(start + row * row_bytes, found + row * row_bytes, num_bytes)

    def _block(self, group: int, request: int, column: int) -> int:
        """The block at a place of a group's table."""
        table = int(self.context.block_table_ptrs[group])
        place = request * self.context.block_table_stride_req + column
        return ctypes.c_int32.from_address(table + place * _INT32_BYTES).value
