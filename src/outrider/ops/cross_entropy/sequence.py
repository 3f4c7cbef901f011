"""Cross entropy of hidden rows under a vocabulary matrix, the logits never whole in memory.

The logits are by far the largest tensors of a step, and one row's need no other's. So rows are
taken in blocks whose logits stay in the cache, and since the loss is known to be one number, the
gradient is computed on the way forward, while they are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.ops.autograd import apply
from outrider.ops.native import kernels, over_threads

BLOCK_SIZE = 128  # rows; at a vocabulary of 4096, 2 MiB of logits


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of `F.cross_entropy(hidden @ weight.T, targets)`, in nats.

    Args:
        hidden: [N, C], float32 or better, as the softmax runs in its dtype.
        weight: [V, C].
        targets: [N] int64.

    Returns:
        A scalar.
    """
    loss: Tensor = apply(
        _LinearCrossEntropy, hidden.contiguous(), weight.contiguous(), targets.contiguous()
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        native = kernels(hidden)
        copies = 1 if native is None else native.num_threads
        losses = hidden.new_empty(len(hidden))
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = weight.new_zeros(copies, *weight.shape) if wants_weight else None
        if native is not None:
            tensors = (hidden, weight, targets, losses, grad_hidden, grad_weight)
            native("cross_entropy", *hidden.shape, len(weight), *tensors)
        else:
            _blocks(hidden, weight, targets, losses, grad_hidden, grad_weight)
        if grad_weight is not None:
            grad_weight = over_threads(grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.num_rows = len(hidden)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept: tuple[Tensor | None, ...] = ctx.saved_tensors
        num_rows = ctx.num_rows
        return *(None if x is None else x * (grad / num_rows) for x in kept), None


def _blocks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    losses: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    """Fills the losses and the wanted gradients of their sum; that of the weight is added to."""
    num_rows = len(hidden)
    logits = hidden.new_empty(min(BLOCK_SIZE, num_rows), len(weight))
    log_probs = torch.empty_like(logits)
    for start in range(0, num_rows, BLOCK_SIZE):
        rows = slice(start, start + BLOCK_SIZE)
        block, target = hidden[rows], targets[rows, None]
        size = len(block)
        torch.mm(block, weight.t(), out=logits[:size])
        torch.log_softmax(logits[:size], dim=-1, out=log_probs[:size])
        losses[rows] = -log_probs[:size].gather(1, target)[:, 0]
        if grad_hidden is None and grad_weight is None:
            continue
        grad = log_probs[:size].exp_()
        grad.scatter_add_(1, target, grad.new_full((size, 1), -1.0))
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[rows])
        if grad_weight is not None:
            grad_weight[0].addmm_(grad.t(), block)
