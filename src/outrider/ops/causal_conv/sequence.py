"""The depthwise causal convolution and its silu over whole sequences, with a gradient of its own.

Rows are taken in blocks that stay in the cache; the way back goes through them from the last to
the first, since a row's gradient comes from the rows after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.ops.autograd import apply
from outrider.ops.native import kernels, over_threads, row_stride

BLOCK_SIZE = 128  # rows


def causal_conv_silu(rows: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Silu of `causal_conv_naive` over rows that follow zeros.

    Args:
        rows: [B, T, channels].
        weight: [channels, taps]; the last tap is the row itself.
        dilation: distance of two taps in rows.

    Returns:
        [B, T, channels].
    """
    output: Tensor = apply(_CausalConvSilu, rows, weight, dilation)
    return output


class _CausalConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, dilation: int) -> Tensor:
        by_tap = weight.t().contiguous()
        ctx.dilation = dilation
        if (native := kernels(rows)) is not None:
            rows, stride = row_stride(rows)
            output = rows.new_empty(rows.shape)
            sizes = (*rows.shape, len(by_tap), dilation)
            native("causal_conv_silu", *sizes, rows, stride, by_tap, output)
            ctx.save_for_backward(rows, by_tap)
            return output
        last = len(by_tap) - 1
        summed, output = rows.new_empty(rows.shape), rows.new_empty(rows.shape)
        for one, one_sum, one_output in zip(rows, summed, output, strict=True):
            for start in range(0, len(one), BLOCK_SIZE):
                stop = min(start + BLOCK_SIZE, len(one))
                block = one_sum[start:stop]
                torch.mul(one[start:stop], by_tap[last], out=block)
                for back in range(1, last + 1):
                    shift = back * dilation
                    first = max(start, shift)
                    if first < stop:
                        block[first - start :].addcmul_(
                            one[first - shift : stop - shift], by_tap[last - back]
                        )
                torch.sigmoid(block, out=one_output[start:stop])
                one_output[start:stop].mul_(block)
        ctx.save_for_backward(rows, by_tap, summed)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, by_tap, *summed = ctx.saved_tensors
        grad_rows = rows.new_empty(rows.shape)
        if not summed:
            native = kernels(rows)
            assert native is not None, "the kernels were disabled between forward and backward"
            rows, stride = row_stride(rows)
            by_thread = by_tap.new_zeros(native.num_threads, *by_tap.shape)
            sizes = (*rows.shape, len(by_tap), ctx.dilation)
            tensors = (grad.contiguous(), grad_rows, by_thread)
            native("causal_conv_silu_gradient", *sizes, rows, stride, by_tap, *tensors)
            return grad_rows, over_threads(by_thread).t(), None
        grad_taps = torch.zeros_like(by_tap)
        for parts in zip(rows, summed[0], grad, grad_rows, strict=True):
            _one_sequence_gradient(*parts, by_tap, grad_taps, ctx.dilation)
        return grad_rows, grad_taps.t(), None


def _one_sequence_gradient(
    rows: Tensor,
    summed: Tensor,
    grad: Tensor,
    grad_rows: Tensor,
    by_tap: Tensor,
    grad_taps: Tensor,
    dilation: int,
) -> None:
    """Fills the gradient of the rows [T, channels] of one sequence, adds that of the taps."""
    last = len(by_tap) - 1
    history = last * dilation
    # Gradients of the sums in a block, and after them those of the rows that read back into it.
    window = rows.new_zeros(BLOCK_SIZE + history, rows.shape[1])
    for start in reversed(range(0, len(rows), BLOCK_SIZE)):
        stop = min(start + BLOCK_SIZE, len(rows))
        size = stop - start
        window[size : size + history] = window[:history].clone()
        block, values = window[:size], summed[start:stop]
        sigmoid = torch.sigmoid(values)
        slope = torch.addcmul(sigmoid, sigmoid, sigmoid, value=-1.0).mul_(values).add_(sigmoid)
        torch.mul(grad[start:stop], slope, out=block)
        torch.mul(block, by_tap[last], out=grad_rows[start:stop])
        for back in range(last + 1):
            shift = back * dilation
            if back:
                grad_rows[start:stop].addcmul_(window[shift : shift + size], by_tap[last - back])
            first = max(start, shift)
            if first < stop:
                product = block[first - start :] * rows[first - shift : stop - shift]
                grad_taps[last - back] += product.sum(0)
