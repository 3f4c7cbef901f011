"""Dense attention of whole sequences, at any draft depth, with a gradient of its own.

Queries are taken in blocks, and a block meets only the keys before its end, so that the half of
the products that causality hides is mostly not computed. The probabilities are kept for the
gradient; on the way they are summed up into what the indexer learns from.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.ops.autograd import apply

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_SIZE = 128  # queries


def attend_sequence(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    depths: Sequence[int],
    mass_ratio: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Dense causal attention of the deepest of some draft depths; law of `attend_sequence_naive`.

    Row p attends to the first depth's rows up to p - (depths[-1] - depths[0]), from row depths[0]
    on, and to one row of each deeper depth d, the row p - (depths[-1] - d).

    Args:
        query: [B, T, H, D], of depth depths[-1].
        keys: one [B, T, Hk, D] a depth.
        values: one [B, T, Hk, D] a depth.
        depths: ascending, at least one.
        mass_ratio: r, to return the probability on each block of r rows of the first depth too.

    Returns:
        [B, T, H, D], and the mean over heads of the mass on each block, [B, T, T // r] without
        gradient, or None. What it says of a block that is not complete at a row means nothing.
    """
    output, mass = apply(_AttendSequence, query, tuple(depths), mass_ratio, *keys, *values)
    return output, mass


def _heads_first(x: Tensor) -> Tensor:
    """[B, T, Hk, D] to [B * Hk, T, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _back(x: Tensor, batch: int) -> Tensor:
    """The inverse of `_heads_first`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _shifted(x: Tensor, rows: int) -> Tensor:
    """Row p takes row p - rows of [b, T, D]; the first rows take zeros."""
    if not rows:
        return x
    moved = torch.zeros_like(x)
    moved[:, rows:] = x[:, :-rows]
    return moved


@functools.lru_cache(maxsize=8)
def _mask(
    length: int, offset: int, first: int, group: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """0 or -inf for each folded query and key of the first depth, [T * group, T]; not modified."""
    places = torch.arange(length, device=device)
    seen = (places <= places[:, None] - offset) & (places >= first)
    if not offset:
        seen = seen | (places == places[:, None])
    mask = torch.where(seen, 0.0, -torch.inf).to(dtype)
    return mask.repeat_interleave(group, dim=0)


class _Plan:
    """Which keys a block of queries meets: the shapes that forward and backward share."""

    def __init__(self, query: Tensor, num_key_heads: int, depths: tuple[int, ...]) -> None:
        self.batch, self.length, self.heads, self.width = query.shape
        self.key_heads = num_key_heads
        self.group = self.heads // num_key_heads
        self.depths = depths
        self.scale = self.width**-0.5
        # A head whose first depth is the one that attends sees its own row in any case.
        self.offset = depths[-1] - depths[0]
        self.mask = _mask(
            self.length, self.offset, depths[0], self.group, query.dtype, query.device
        )

    def fold(self, query: Tensor) -> Tensor:
        """[B, T, H, D] to [B * Hk, T * group, D], the heads of a key head side by side."""
        folded = query.unflatten(2, (self.key_heads, self.group)).transpose(1, 2)
        return folded.reshape(self.batch * self.key_heads, -1, self.width)

    def unfold(self, folded: Tensor) -> Tensor:
        """The inverse of `fold`."""
        parts = folded.view(self.batch, self.key_heads, self.length, self.group, self.width)
        return parts.transpose(1, 2).reshape(self.batch, self.length, self.heads, self.width)

    def blocks(self) -> list[tuple[slice, int]]:
        """Rows of the folded queries of each block, and how many keys of depth one it meets."""
        blocks = []
        for start in range(0, self.length, BLOCK_SIZE):
            stop = min(start + BLOCK_SIZE, self.length)
            rows = slice(start * self.group, stop * self.group)
            blocks.append((rows, max(stop - self.offset, 0)))
        return blocks

    def deeper(self, per_depth: Sequence[Tensor]) -> list[Tensor]:
        """Of each deeper depth the row that each folded query meets, [B * Hk, T * group, D]."""
        return [
            _shifted(_heads_first(x), self.depths[-1] - depth).repeat_interleave(self.group, dim=1)
            for x, depth in zip(per_depth[1:], self.depths[1:], strict=True)
        ]

    def from_deeper(self, grads: list[Tensor]) -> list[Tensor]:
        """The transpose of `deeper`."""
        results = []
        for grad, depth in zip(grads, self.depths[1:], strict=True):
            summed = grad.unflatten(1, (-1, self.group)).sum(2)
            back = self.depths[-1] - depth
            moved = torch.zeros_like(summed)
            moved[:, : self.length - back] = summed[:, back:]
            results.append(_back(moved, self.batch))
        return results


class _AttendSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        depths: tuple[int, ...],
        mass_ratio: int | None,
        *keys_values: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        keys, values = keys_values[: len(depths)], keys_values[len(depths) :]
        plan = _Plan(query, keys[0].shape[2], depths)
        folded = plan.fold(query)
        first_key, first_value = _heads_first(keys[0]), _heads_first(values[0])
        deep_keys, deep_values = plan.deeper(keys), plan.deeper(values)
        output = torch.empty_like(folded)
        mass = None
        if mass_ratio is not None:
            mass = query.new_zeros(plan.batch, plan.length, plan.length // mass_ratio)
        kept = []
        for rows, num_keys in plan.blocks():
            block = folded[:, rows]
            logits = torch.baddbmm(
                plan.mask[rows, :num_keys], block, first_key[:, :num_keys].mT, alpha=plan.scale
            )
            if deep_keys:
                own = [torch.linalg.vecdot(block, key[:, rows]) * plan.scale for key in deep_keys]
                logits = torch.cat([logits, torch.stack(own, dim=-1)], dim=-1)
            probs = torch.softmax(logits, dim=-1)
            torch.bmm(probs[..., :num_keys], first_value[:, :num_keys], out=output[:, rows])
            for i, value in enumerate(deep_values):
                output[:, rows].addcmul_(probs[..., num_keys + i, None], value[:, rows])
            if mass is not None and mass_ratio is not None:
                _add_mass(mass, probs[..., :num_keys], rows, plan, mass_ratio)
            kept.append(probs)
        ctx.save_for_backward(folded, output, *keys_values, *kept)
        ctx.plan = plan
        if mass is not None:
            ctx.mark_non_differentiable(mass)
        return plan.unfold(output), mass

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor, _grad_mass: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        num_depths = len(plan.depths)
        folded, output, *rest = ctx.saved_tensors
        keys, values = rest[:num_depths], rest[num_depths : 2 * num_depths]
        first_key, first_value = _heads_first(keys[0]), _heads_first(values[0])
        deep_keys, deep_values = plan.deeper(keys), plan.deeper(values)
        grad = plan.fold(grad_output)
        grad_query = torch.empty_like(folded)
        grad_key, grad_value = torch.zeros_like(first_key), torch.zeros_like(first_value)
        grad_deep_keys = [torch.empty_like(folded) for _ in deep_keys]
        grad_deep_values = [torch.empty_like(folded) for _ in deep_values]
        for (rows, num_keys), probs in zip(plan.blocks(), rest[2 * num_depths :], strict=True):
            block, g = folded[:, rows], grad[:, rows]
            shared = torch.linalg.vecdot(g, output[:, rows])[..., None]
            first = probs[..., :num_keys]
            grad_value[:, :num_keys].baddbmm_(first.mT, g)
            grad_logits = torch.bmm(g, first_value[:, :num_keys].mT).sub_(shared).mul_(first)
            torch.bmm(grad_logits, first_key[:, :num_keys], out=grad_query[:, rows])
            grad_key[:, :num_keys].baddbmm_(grad_logits.mT, block, alpha=plan.scale)
            for i, (key, value) in enumerate(zip(deep_keys, deep_values, strict=True)):
                prob = probs[..., num_keys + i, None]
                torch.mul(g, prob, out=grad_deep_values[i][:, rows])
                own = torch.linalg.vecdot(g, value[:, rows])[..., None].sub_(shared).mul_(prob)
                grad_query[:, rows].addcmul_(own, key[:, rows])
                torch.mul(block, own.mul_(plan.scale), out=grad_deep_keys[i][:, rows])
        grad_query.mul_(plan.scale)
        grad_keys = [_back(grad_key, plan.batch), *plan.from_deeper(grad_deep_keys)]
        grad_values = [_back(grad_value, plan.batch), *plan.from_deeper(grad_deep_values)]
        return plan.unfold(grad_query), None, None, *grad_keys, *grad_values


def _add_mass(mass: Tensor, probs: Tensor, rows: slice, plan: _Plan, ratio: int) -> None:
    """Sums the probabilities of a block of queries by blocks of keys, mean over heads."""
    num_blocks = probs.shape[-1] // ratio
    by_head = probs.view(plan.batch, plan.key_heads, -1, plan.group, probs.shape[-1])
    # Head by head: a reduction over both dimensions at once takes ten times as long.
    mean = torch.zeros_like(by_head[:, 0, :, 0])
    for key_head in range(plan.key_heads):
        for member in range(plan.group):
            mean += by_head[:, key_head, :, member]
    mean = mean.div_(plan.heads)[..., : num_blocks * ratio]
    places = slice(rows.start // plan.group, rows.stop // plan.group)
    mass[:, places, :num_blocks] = mean.unflatten(-1, (num_blocks, ratio)).sum(-1)
