"""Normalised rows in few passes over memory, forward and backward.

With r = 1 / sqrt(mean x^2 + eps) and n = x r, the gradient of n turns into that of x as
r (dn - n mean(n dn)): one reduction more, and nothing but x and r is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.ops.autograd import apply
from outrider.ops.native import kernels, over_threads, row_stride

# Activations of the gate, as the native kernel numbers them.
_NONE, _SIGMOID, _SILU = range(3)


def unit_rows(x: Tensor, eps: float) -> Tensor:
    """Rows of (nearly) unit length; the law of `unit_rows_naive`.

    Args:
        x: [..., D].
        eps: added to the sum of squares.
    """
    width = x.shape[-1]
    # rms(x) is |x| / sqrt(D).
    factor = x.new_full((width,), width**-0.5)
    return rms_rows(x, factor, eps / width)


def rms_rows(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    """Rows over their root mean square; the law of `rms_rows_naive`.

    Args:
        x: [..., D].
        factor: [D], or [S, D] where each of S rows in turn has its own.
        eps: added to the mean square.
    """
    if x.dim() > 1 and kernels(x) is not None:
        fused: Tensor = apply(_NativeRmsRows, x, factor, None, eps, _NONE)
        return fused
    result: Tensor = apply(_RmsRows, x, factor, eps)
    return result


def gated_rms_rows(x: Tensor, factor: Tensor, gate: Tensor, eps: float, *, is_silu: bool) -> Tensor:
    """Rows over their root mean square, gated; the law of `gated_rms_rows_naive`.

    Args:
        x: [..., D].
        factor: [D].
        gate: [..., D], before its activation.
        eps: added to the mean square.
        is_silu: the activation is silu, else sigmoid.
    """
    if x.dim() > 1 and kernels(x) is not None:
        activation = _SILU if is_silu else _SIGMOID
        fused: Tensor = apply(_NativeRmsRows, x, factor, gate, eps, activation)
        return fused
    result: Tensor = apply(_GatedRmsRows, x, factor, gate, eps, is_silu)
    return result


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _through_norm(grad_normed: Tensor, normed: Tensor, inverse_rms: Tensor) -> Tensor:
    """Overwrites the gradient of the normalised rows with that of the rows."""
    along = (grad_normed * normed).sum(-1, keepdim=True).div_(-normed.shape[-1])
    return grad_normed.addcmul_(normed, along).mul_(inverse_rms)


class _RmsRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, eps: float) -> Tensor:
        inverse_rms = _inverse_rms(x, eps)
        ctx.save_for_backward(x, inverse_rms, factor)
        return (x * inverse_rms).mul_(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse_rms, factor = ctx.saved_tensors
        normed = x * inverse_rms
        grad_factor = None
        if ctx.needs_input_grad[1]:
            grad_factor = (grad * normed).flatten(0, -1 - factor.dim()).sum(0)
        return _through_norm(grad * factor, normed, inverse_rms), grad_factor, None


class _GatedRmsRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, factor: Tensor, gate: Tensor, eps: float, is_silu: bool
    ) -> Tensor:
        inverse_rms = _inverse_rms(x, eps)
        ctx.save_for_backward(x, inverse_rms, factor, gate)
        ctx.is_silu = is_silu
        activated = torch.sigmoid(gate)
        if is_silu:
            activated.mul_(gate)
        return (x * inverse_rms).mul_(factor).mul_(activated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse_rms, factor, gate = ctx.saved_tensors
        normed, activated = x * inverse_rms, torch.sigmoid(gate)
        slope = torch.addcmul(activated, activated, activated, value=-1.0)
        if ctx.is_silu:
            slope.mul_(gate).add_(activated)
            activated.mul_(gate)
        product = grad * normed
        grad_gate = slope.mul_(product).mul_(factor)
        grad_factor = product.mul_(activated).flatten(0, -2).sum(0)
        grad_normed = activated.mul_(grad).mul_(factor)
        return _through_norm(grad_normed, normed, inverse_rms), grad_factor, grad_gate, None, None


class _NativeRmsRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, factor: Tensor, gate: Tensor | None, eps: float, activation: int
    ) -> Tensor:
        native = kernels(x)
        assert native is not None, "only called where there are kernels"
        x, x_row = row_stride(x, 2)
        gate, gate_row = (None, 0) if gate is None else row_stride(gate, 2)
        factor = factor.contiguous()
        width = x.shape[-1]
        ctx.sizes = (x.numel() // x.shape[-2:].numel(), x.shape[-2], width)
        ctx.numbers = (x_row, factor.numel() // width, gate_row, activation, eps)
        ctx.save_for_backward(x, factor, gate)
        output = x.new_empty(x.shape)
        native("rms_rows", *ctx.sizes, *_interleaved(x, factor, gate, ctx.numbers), output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, factor, gate = ctx.saved_tensors
        native = kernels(x)
        assert native is not None, "the kernels were disabled between forward and backward"
        grad_x = x.new_empty(x.shape)
        grad_factor = factor.new_zeros(native.num_threads, *factor.shape)
        grad_gate = None if gate is None else x.new_empty(x.shape)
        tensors = (grad.contiguous(), grad_x, grad_factor, grad_gate)
        arguments = _interleaved(x, factor, gate, ctx.numbers)
        native("rms_rows_gradient", *ctx.sizes, *arguments, *tensors)
        return grad_x, over_threads(grad_factor), grad_gate, None, None


def _interleaved(
    x: Tensor, factor: Tensor, gate: Tensor | None, numbers: tuple[int, int, int, int, float]
) -> tuple[Tensor | float | None, ...]:
    """The arguments that both kernels begin with, in their order."""
    x_row, factors, gate_row, activation, eps = numbers
    return x, x_row, factor, factors, gate, gate_row, activation, eps
