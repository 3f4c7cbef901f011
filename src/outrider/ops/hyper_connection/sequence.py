"""The gated residual over S streams with a gradient of its own, for training.

The streams are S times as wide as anything else, and the ordinary graph of these few formulas
passes over them some thirty times. Here rows are taken in blocks that stay in the cache of one
core, so that main memory sees each tensor once, and the norm's factor is folded into the matrices
that read the normalised streams, so that beside the streams only the gate is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.ops.autograd import apply
from outrider.ops.native import kernels, over_threads

BLOCK_SIZE = 128  # rows; of four streams of 160 numbers, 320 KiB a tensor


def read_streams(
    streams: Tensor,
    norm_weight: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes the streams into a block's input; the law is that of `read_streams_naive`.

    Args:
        streams: [N, S, C].
        norm_weight: [S, C], the norm's factor less one.
        down: [R, S * C].
        up: [S * C, R].
        inject: [S, S * C], or None where nothing is injected.
        eps: of the norm.

    Returns:
        The input [N, C], the strength of the injection [N, S] ([N, 0] without `inject`), and the
        streams themselves: what is injected into these adds its gradient to that of the input in
        a pass that is made anyway.
    """
    matrices = down if inject is None else torch.cat([down, inject])
    hidden, strength, same = apply(
        _ReadStreams, streams.contiguous(), norm_weight, matrices, up, eps
    )
    return hidden, strength, same


def inject_streams(streams: Tensor, strength: Tensor, output: Tensor) -> Tensor:
    """Adds a block's output to every stream.

    Args:
        streams: [N, S, C], as `read_streams` returned them.
        strength: [N, S].
        output: [N, C].

    Returns:
        [N, S, C].
    """
    result: Tensor = apply(_InjectStreams, streams, strength, output.contiguous())
    return result


class _ReadStreams(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, norm_weight: Tensor, matrices: Tensor, up: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, num_streams, width = streams.shape
        inner, rank = len(matrices), up.shape[1]
        factor = (1.0 + norm_weight).flatten()
        folded = (matrices * factor).div_(num_streams)
        share = factor / num_streams
        gate = streams.new_empty(num_rows, num_streams * width)
        inverse_rms = streams.new_empty(num_rows, num_streams)
        logits, mix = streams.new_empty(num_rows, inner), streams.new_empty(num_rows, rank)
        hidden = streams.new_empty(num_rows, width)
        strength = streams.new_empty(num_rows, inner - rank)
        inputs = (streams, folded, up, share, eps)
        outputs = (gate, inverse_rms, logits, mix, hidden, strength)
        if (native := kernels(streams)) is not None:
            native("read_streams", num_rows, num_streams, width, rank, inner, *inputs, *outputs)
        else:
            _read_blocks(*inputs, *outputs)
        ctx.save_for_backward(streams, inverse_rms, logits, mix, gate, share, folded, up, matrices)
        return hidden, strength, streams

    @staticmethod
    def backward(
        ctx: Any, grad_hidden: Tensor, grad_strength: Tensor, grad_same: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved: list[Tensor]
        *saved, matrices = ctx.saved_tensors
        streams, share, folded, up = saved[0], *saved[5:]
        num_rows, num_streams, width = streams.shape
        grad = torch.empty_like(streams)
        grads = [x.contiguous() for x in (grad_hidden, grad_strength, grad_same)]
        native = kernels(streams)
        copies = 1 if native is None else native.num_threads
        sums = [x.new_zeros(copies, *x.shape) for x in (share, folded, up)]
        if native is not None:
            sizes = (num_rows, num_streams, width, up.shape[1], len(folded))
            native("read_streams_gradient", *sizes, *saved, *grads, grad, *sums)
        else:
            _read_blocks_gradient(saved, grads, grad, [x[0] for x in sums])
        grad_factor, grad_folded, grad_up = map(over_threads, sums)
        grad_factor = (grad_factor + (grad_folded * matrices).sum(0)) / num_streams
        return grad, grad_factor.view(num_streams, width), grad_folded * share, grad_up, None


def _read_blocks(
    streams: Tensor,
    folded: Tensor,
    up: Tensor,
    share: Tensor,
    eps: float,
    gate: Tensor,
    inverse_rms: Tensor,
    logits: Tensor,
    mix: Tensor,
    hidden: Tensor,
    strength: Tensor,
) -> None:
    """Fills the last six, of which only the gate is as wide as the streams."""
    num_rows, num_streams, width = streams.shape
    rank = up.shape[1]
    buffer = streams.new_empty(min(BLOCK_SIZE, num_rows), num_streams, width)
    for start in range(0, num_rows, BLOCK_SIZE):
        rows = slice(start, start + BLOCK_SIZE)
        scale, block_gate, block_logits = inverse_rms[rows], gate[rows], logits[rows]
        normed = buffer[: len(scale)]
        torch.linalg.vector_norm(streams[rows], dim=-1, out=scale)
        scale.square_().div_(width).add_(eps).rsqrt_()
        torch.mul(streams[rows], scale[..., None], out=normed)
        torch.mm(normed.flatten(1), folded.t(), out=block_logits)
        sigmoid = torch.sigmoid(block_logits)
        torch.mul(block_logits[:, :rank], sigmoid[:, :rank], out=mix[rows])
        torch.mul(sigmoid[:, rank:], 2.0, out=strength[rows])
        torch.mm(mix[rows], up.t(), out=block_gate)
        block_gate.sigmoid_()
        normed.flatten(1).mul_(block_gate).mul_(share)
        torch.sum(normed, 1, out=hidden[rows])


def _read_blocks_gradient(
    saved: list[Tensor], grads: list[Tensor], grad: Tensor, sums: list[Tensor]
) -> None:
    """Fills the gradient of the streams and adds to those of the parameters.

    Args:
        saved: as the forward pass keeps them.
        grads: of its three outputs.
        grad: of the streams, to fill.
        sums: of factor, folded matrices and `up`, to add to. The first lacks what comes through the
            folded matrices.
    """
    streams, inverse_rms, logits, mix, gate, share, folded, up = saved
    grad_hidden, grad_strength, grad_same = grads
    grad_factor, grad_folded, grad_up = sums
    num_rows, num_streams, width = streams.shape
    buffers = streams.new_empty(3, min(BLOCK_SIZE, num_rows), num_streams, width)
    for start in range(0, num_rows, BLOCK_SIZE):
        rows = slice(start, start + BLOCK_SIZE)
        scale, block_gate = inverse_rms[rows], gate[rows]
        normed, gated, product = buffers[:, : len(scale)]
        torch.mul(streams[rows], scale[..., None], out=normed)
        torch.mul(block_gate.view_as(normed), grad_hidden[rows, None], out=gated)
        torch.mul(gated, normed, out=product)
        flat = product.flatten(1)
        grad_factor += flat.sum(0)
        flat.addcmul_(flat, block_gate, value=-1.0).mul_(share)  # now of the gate's logits
        grad_up.addmm_(flat.t(), mix[rows])
        to_logits = _activation_gradient(flat @ up, grad_strength[rows], logits[rows])
        grad_folded.addmm_(to_logits.t(), normed.flatten(1))
        gated.flatten(1).mul_(share).addmm_(to_logits, folded)  # now of the normed streams
        torch.mul(gated, normed, out=product)
        along = product.sum(-1, keepdim=True).div_(-width)
        gated.addcmul_(normed, along)
        torch.addcmul(grad_same[rows], gated, scale[..., None], out=grad[rows])


def _activation_gradient(grad_mix: Tensor, grad_strength: Tensor, logits: Tensor) -> Tensor:
    """Through silu for the first columns and 2 sigmoid for the rest, [N, R + S]."""
    rank = grad_mix.shape[1]
    sigmoid = torch.sigmoid(logits)
    slope = sigmoid * (1.0 - sigmoid)
    grad = torch.empty_like(logits)
    torch.addcmul(sigmoid[:, :rank], logits[:, :rank], slope[:, :rank], out=grad[:, :rank])
    grad[:, :rank].mul_(grad_mix)
    torch.mul(grad_strength, slope[:, rank:], out=grad[:, rank:])
    grad[:, rank:].mul_(2.0)
    return grad


class _InjectStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, strength: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(strength, output)
        if (native := kernels(streams)) is not None:
            result = torch.empty_like(streams)
            native("inject_streams", *streams.shape, streams, strength, output, result)
            return result
        return torch.addcmul(streams, strength[..., None], output[..., None, :])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        strength, output = ctx.saved_tensors
        if (native := kernels(grad)) is not None:
            grad = grad.contiguous()
            grads = torch.empty_like(strength), torch.empty_like(output)
            native("inject_streams_gradient", *grad.shape, grad, strength, output, *grads)
            return grad, *grads
        grad_strength = torch.bmm(grad, output[..., None]).squeeze(-1)
        return grad, grad_strength, torch.bmm(strength[:, None], grad).squeeze(1)
