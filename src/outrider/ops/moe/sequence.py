"""The routed experts over many rows with a gradient of its own, for training.

Rows are sorted by expert once, each expert runs over its own, and what goes back is gathered with
the inverse of that order: no table of zeros is made for an expert's share of the packed weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.autograd import apply
from outrider.ops.native import kernels


def routed_experts_sequence(
    hidden: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Routed experts, differentiable. Args and result as in `routed_experts_naive`."""
    form = _RoutedExperts if kernels(hidden) is None else _NativeExperts
    output: Tensor = apply(form, hidden, expert_ids, weights, gate_up, down)
    return output


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, differentiable, [..., I] each."""
    output: Tensor = apply(_GatedProduct, gate, up)
    return output


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        num_rows, k = expert_ids.shape
        order, place, counts = _sorted_pairs(expert_ids, len(gate_up))
        parts = _parts(counts.tolist())
        inputs = hidden[order // k]
        products = hidden.new_empty(len(order), gate_up.shape[1])
        outputs = torch.empty_like(inputs)
        for expert, rows in parts:
            torch.mm(inputs[rows], gate_up[expert].t(), out=products[rows])
        gate, up = products.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        for expert, rows in parts:
            torch.mm(inner[rows], down[expert].t(), out=outputs[rows])
        by_row = outputs[place].view(num_rows, k, -1)
        ctx.save_for_backward(inputs, products, inner, order, place, weights, gate_up, down)
        ctx.parts = parts
        return torch.bmm(weights[:, None], by_row).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, products, inner, order, place, weights, gate_up, down = ctx.saved_tensors
        num_rows, k = weights.shape
        grad_outputs = grad[order // k]
        sorted_weights = weights.flatten()[order][:, None]
        grad_inner = torch.empty_like(inner)
        grad_down, grad_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        weighted = inner * sorted_weights
        for expert, rows in ctx.parts:
            torch.mm(grad_outputs[rows], down[expert], out=grad_inner[rows])
            torch.mm(grad_outputs[rows].t(), weighted[rows], out=grad_down[expert])
        # The output of an expert is not kept: its product with the gradient is this one.
        grad_weights = torch.linalg.vecdot(grad_inner, inner)[place].view(num_rows, k)
        grad_inner.mul_(sorted_weights)
        grad_products = torch.empty_like(products)
        _gated_product_gradient(
            grad_inner, *products.chunk(2, dim=-1), *grad_products.chunk(2, dim=-1)
        )
        grad_inputs = torch.empty_like(inputs)
        for expert, rows in ctx.parts:
            torch.mm(grad_products[rows], gate_up[expert], out=grad_inputs[rows])
            torch.mm(grad_products[rows].t(), inputs[rows], out=grad_gate_up[expert])
        grad_hidden = grad_inputs[place].view(num_rows, k, -1).sum(1)
        return grad_hidden, None, grad_weights, grad_gate_up, grad_down


class _NativeExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        native = kernels(hidden)
        assert native is not None, "only called where there are kernels"
        order, place, counts = _sorted_pairs(expert_ids, len(gate_up))
        starts = F.pad(counts.cumsum(0), (1, 0))
        hidden, weights = hidden.contiguous(), weights.contiguous()
        products = hidden.new_empty(len(order), gate_up.shape[1])
        inner = hidden.new_empty(len(order), down.shape[2])
        outputs = hidden.new_empty(len(order), hidden.shape[1])
        result = torch.empty_like(hidden)
        ctx.sizes = (*expert_ids.shape, len(gate_up), hidden.shape[1], down.shape[2])
        inputs = (hidden, order, place, starts, weights, gate_up, down)
        native("routed_experts", *ctx.sizes, *inputs, products, inner, outputs, result)
        ctx.save_for_backward(*inputs, products, inner)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, _, _, _, weights, gate_up, down, *_ = ctx.saved_tensors
        native = kernels(hidden)
        assert native is not None, "the kernels were disabled between forward and backward"
        grad_inputs = hidden.new_empty(weights.numel(), hidden.shape[1])
        grad_hidden, grad_weights = torch.empty_like(hidden), torch.empty_like(weights)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        grads = (grad_inputs, grad_hidden, grad_weights, grad_gate_up, grad_down)
        inputs = (*ctx.saved_tensors, grad.contiguous())
        native("routed_experts_gradient", *ctx.sizes, *inputs, *grads)
        return grad_hidden, None, grad_weights, grad_gate_up, grad_down


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if (native := kernels(gate)) is not None and gate.is_contiguous() and up.is_contiguous():
            output = torch.empty_like(gate)
            native(
                "gated_product", gate.numel() // gate.shape[-1], gate.shape[-1], gate, up, output
            )
            return output
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        if (native := kernels(gate)) is not None and gate.is_contiguous() and up.is_contiguous():
            sizes = (gate.numel() // gate.shape[-1], gate.shape[-1])
            tensors = (grad.contiguous(), gate, up, grad_gate, grad_up)
            native("gated_product_gradient", *sizes, *tensors)
        else:
            _gated_product_gradient(grad, gate, up, grad_gate, grad_up)
        return grad_gate, grad_up


def _gated_product_gradient(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor
) -> None:
    """Fills the gradients of silu(gate) * up, [N, I] each."""
    sigmoid = torch.sigmoid(gate)
    activated = sigmoid * gate
    torch.mul(grad, activated, out=grad_up)
    # silu' = s + silu (1 - s)
    slope = torch.addcmul(activated, activated, sigmoid, value=-1.0).add_(sigmoid)
    torch.mul(slope.mul_(up), grad, out=grad_gate)


def _sorted_pairs(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of row and expert, [N, k], in the order of their experts.

    Returns:
        The flat pair at each place of that order, the place of each flat pair, both [N * k], and
        how many pairs each expert has, [E].
    """
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return order, place, torch.bincount(flat, minlength=num_experts)


def _parts(counts: list[int]) -> list[tuple[int, slice]]:
    """The rows of each expert that has any, in the order sorted by expert."""
    parts, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            parts.append((expert, slice(start, start + count)))
        start += count
    return parts
