"""The gated delta rule over whole sequences from the zero state, with a gradient of its own.

The same algebra as `chunk.py`, in an order for training: everything inside a chunk is computed for
all chunks at once, and only the state goes from chunk to chunk, in two products each. With G the
running sum of g inside a chunk, D_ij = exp(G_i - G_j) for i >= j and M_c the state before chunk c:

    A = strictly lower part of beta_i (k_i . k_j) D_ij,   P_ij = (q_i . k_j) D_ij
    (I + A) [U W] = [beta v, beta exp(G) k],              V_c = U_c - W_c M_c
    o = exp(G) q M + P V,     M_{c+1} = exp(G_n) M_c + (exp(G_n - G) k)^T V_c

The gradient is the transpose of each line, from the last to the first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.autograd import apply
from outrider.ops.native import kernels, row_stride

SEQUENCE_CHUNK_SIZE = 32  # rows; measured against 16 and 64
_NATIVE_WIDTH = 16  # heads of other widths than multiples of this one run as tensor operations


def sequence_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs of the gated delta rule from the zero state; the law of `gated_delta_rule_naive`.

    Args:
        q: [B, T, hk, dk], normalised and scaled; h is a multiple of hk, and value head j reads
            key head j // (h / hk).
        k: [B, T, hk, dk], normalised.
        v: [B, T, h, dv].
        g: [B, T, h], log decay.
        beta: [B, T, h].

    Returns:
        [B, T, h, dv].
    """
    length = q.shape[1]
    sizes = (q.shape[-1], v.shape[-1])
    if kernels(q) is not None and not any(size % _NATIVE_WIDTH for size in sizes):
        native_output: Tensor = apply(_NativeDeltaRule, q, k, v, g, beta)
        return native_output
    surplus = -length % SEQUENCE_CHUNK_SIZE
    if surplus:
        # Rows of zeros neither write nor decay.
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, surplus)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, surplus)) for x in (g, beta))
    output: Tensor = apply(_SequenceDeltaRule, q, k, v, g, beta)
    return output[:, :length]


def _chunks(x: Tensor) -> Tensor:
    """[B, T, h, ...] to [num_chunks, B, h, n, ...]."""
    x = x.unflatten(1, (-1, SEQUENCE_CHUNK_SIZE))
    return x.permute(1, 0, 3, 2, *range(4, x.dim())).contiguous()


def _rows(x: Tensor) -> Tensor:
    """The inverse of `_chunks`."""
    return x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(1, 2)


def _grouped(x: Tensor, num_key_heads: int) -> Tensor:
    """[nc, B, h, ...] to [nc, B, hk, h / hk, ...]."""
    return x.unflatten(2, (num_key_heads, -1))


def _times_key_heads(x: Tensor, per_key_head: Tensor) -> Tensor:
    """[nc, B, h, ...] times [nc, B, hk, ...] of the key head that each value head reads."""
    return (_grouped(x, per_key_head.shape[2]) * per_key_head[:, :, :, None]).flatten(2, 3)


def _decay(cumulative: Tensor) -> Tensor:
    """Running sums [nc, B, h, n, 1] to D [nc, B, h, n, n], zero above the diagonal."""
    n = cumulative.shape[-2]
    ones = torch.ones_like(cumulative)
    left, right = torch.cat([cumulative, ones], -1), torch.cat([ones, -cumulative], -1)
    above = cumulative.new_full((n, n), -torch.inf).triu_(1)
    # As a product with the mask in its accumulator: broadcast differences cost three times more.
    logs = torch.baddbmm(above, left.flatten(0, 2), right.flatten(0, 2).mT)
    return logs.exp_().view(*cumulative.shape[:3], n, n)


class _SequenceDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, beta = _chunks(q), _chunks(k), _chunks(v), _chunks(beta)[..., None]
        cumulative = _chunks(g).cumsum(-1)[..., None]
        growth, total = cumulative.exp(), cumulative[..., -1:, :].exp()
        to_end = (cumulative[..., -1:, :] - cumulative).exp_()
        dv = v.shape[-1]
        decay = _decay(cumulative)
        scores = _times_key_heads(decay, q @ k.mT)
        # Its diagonal belongs to no system: the solver takes ones for it, and the gradient zeros.
        interaction = _times_key_heads(decay, k @ k.mT)
        rhs = torch.cat([v * beta, _times_key_heads(beta * growth, k)], dim=-1)
        solved = torch.linalg.solve_triangular(
            interaction * beta, rhs, upper=False, unitriangular=True
        )
        u, w = solved[..., :dv].contiguous(), solved[..., dv:].contiguous()
        k_end = _times_key_heads(to_end, k)
        q_grown = _times_key_heads(growth, q)
        states = v.new_zeros(len(q) + 1, *v.shape[1:3], k.shape[-1], dv)
        written = torch.empty_like(v)
        for c in range(len(q)):
            torch.sub(u[c], w[c] @ states[c], out=written[c])
            torch.addcmul(k_end[c].mT @ written[c], total[c], states[c], out=states[c + 1])
        output = (q_grown @ states[:-1]).add_(scores @ written)
        ctx.save_for_backward(
            q, k, v, beta, cumulative, decay, scores, interaction, solved, states, written
        )
        return _rows(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        q, k, v, beta, cumulative, decay, scores, interaction, solved, states, written = (
            ctx.saved_tensors
        )
        heads, dv = k.shape[2], v.shape[-1]
        growth, total = cumulative.exp(), cumulative[..., -1:, :].exp()
        to_end = (cumulative[..., -1:, :] - cumulative).exp_()
        k_end, q_grown = _times_key_heads(to_end, k), _times_key_heads(growth, q)
        w = solved[..., dv:].contiguous()
        grad_output = _chunks(grad_output)
        # Down the chain of states, the last chunk first.
        grad_written = scores.mT @ grad_output
        grad_states = torch.zeros_like(states)
        from_queries = q_grown.mT @ grad_output
        for c in reversed(range(len(q))):
            after = grad_states[c + 1]
            grad_written[c] += k_end[c] @ after
            torch.addcmul(from_queries[c], total[c], after, out=grad_states[c])
            grad_states[c] -= w[c].mT @ grad_written[c]
        before, after = states[:-1], grad_states[1:]
        # The triangular system.
        grad_solved = torch.cat([grad_written, (grad_written @ before.mT).neg_()], dim=-1)
        grad_rhs = torch.linalg.solve_triangular(
            (interaction * beta).mT, grad_solved, upper=True, unitriangular=True
        )
        n = SEQUENCE_CHUNK_SIZE
        below = torch.full((n, n), -1.0, dtype=v.dtype, device=v.device).tril_(-1)
        grad_interaction = (grad_rhs @ solved.mT).mul_(below)
        grad_beta = (grad_interaction * interaction).sum(-1, keepdim=True)
        grad_interaction.mul_(beta)
        # What D_ij multiplies, in A and in P.
        grad_scores = grad_output @ written.mT
        along = (grad_interaction * interaction).addcmul_(grad_scores, scores)
        grad_cumulative = along.sum(-1, keepdim=True) - along.sum(-2)[..., None]
        grad_kk = _grouped(grad_interaction.mul_(decay), heads).sum(3)
        grad_qk = _grouped(grad_scores.mul_(decay), heads).sum(3)
        # The rows scaled by exp(G), beta exp(G) and exp(G_n - G).
        grad_q_grown = grad_output @ before.mT
        grad_k_end = written @ after.mT
        grad_k_rhs = grad_rhs[..., dv:]
        grad_cumulative += (grad_q_grown * q_grown).sum(-1, keepdim=True)
        along_k = _times_key_heads(grad_k_rhs, k).sum(-1, keepdim=True) * growth
        along_end = (grad_k_end * k_end).sum(-1, keepdim=True)
        grad_beta += along_k + (grad_rhs[..., :dv] * v).sum(-1, keepdim=True)
        grad_cumulative += along_k * beta - along_end
        grad_total = (before * after).sum((-1, -2))[..., None, None] * total
        grad_cumulative[..., -1:, :] += grad_total + along_end.sum(-2, keepdim=True)
        grad_v = grad_rhs[..., :dv] * beta
        grad_q = _grouped(grad_q_grown * growth, heads).sum(3).add_(grad_qk @ k)
        grad_k = _grouped((grad_k_end * to_end).addcmul_(grad_k_rhs, beta * growth), heads).sum(3)
        grad_k += grad_qk.mT @ q + (grad_kk + grad_kk.mT) @ k
        # A running sum's gradient runs the other way.
        sums = grad_cumulative[..., 0].cumsum(-1)
        grad_g = sums[..., -1:] - sums + grad_cumulative[..., 0]
        return tuple(_rows(x) for x in (grad_q, grad_k, grad_v, grad_g, grad_beta[..., 0]))


class _NativeDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        native = kernels(q)
        assert native is not None, "only called where there are kernels"
        (q, q_row), (k, k_row), (v, v_row) = (row_stride(x, 2) for x in (q, k, v))
        g, beta = g.contiguous(), beta.contiguous()
        batch, length, key_heads, dk = q.shape
        heads, dv = v.shape[2:]
        num_chunks = -(-length // SEQUENCE_CHUNK_SIZE)
        output = v.new_empty(v.shape)
        written = v.new_empty(batch, heads, num_chunks * SEQUENCE_CHUNK_SIZE, dv)
        states = v.new_empty(batch, heads, num_chunks + 1, dk, dv)
        states[:, :, 0] = 0.0
        ctx.sizes = (batch, length, key_heads, heads // key_heads, dk, dv)
        ctx.rows = (q_row, k_row, v_row)
        inputs = (q, q_row, k, k_row, v, v_row, g, beta)
        native("delta_rule", *ctx.sizes, *inputs, output, written, states)
        ctx.save_for_backward(q, k, v, g, beta, written, states)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, written, states = ctx.saved_tensors
        native = kernels(q)
        assert native is not None, "the kernels were disabled between forward and backward"
        q_row, k_row, v_row = ctx.rows
        grads = tuple(x.new_empty(x.shape) for x in (q, k, v, g, beta))
        inputs = (q, q_row, k, k_row, v, v_row, g, beta, written, states)
        native("delta_rule_gradient", *ctx.sizes, *inputs, grad_output.contiguous(), *grads)
        return grads
