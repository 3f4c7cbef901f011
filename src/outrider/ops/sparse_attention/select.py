"""Which blocks of the past a query attends to.

A query that sees n positions has floor(n / r) complete blocks and a tail of n mod r positions.
It attends to its best budget / r blocks and to the tail. While n <= budget + r - 1 that is
everything, and attention is dense.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(index_queries: Tensor, pooled_keys: Tensor) -> Tensor:
    """Scores of every block for every query: sum over heads of relu(q . k) / sqrt(dI).

    Args:
        index_queries: [b, L, heads, dI].
        pooled_keys: [b, M, dI].

    Returns:
        [b, L, M], float32 or better.
    """
    b, length, heads, dim = index_queries.shape
    dtype = torch.promote_types(index_queries.dtype, torch.float32)
    flat = index_queries.to(dtype).reshape(b, length * heads, dim)
    scores = (flat @ pooled_keys.to(dtype).transpose(1, 2)).relu_()
    return scores.view(b, length, heads, -1).sum(2) * dim**-0.5


def select_blocks(
    scores: Tensor, positions: Tensor, ratio: int, num_selected: int
) -> tuple[Tensor, Tensor]:
    """Marks the best blocks of each query; of equal scores the lowest block wins.

    Args:
        scores: [b, L, M] for M blocks of `ratio` positions.
        positions: [b, L] int64, the queries' places.
        ratio: r.
        num_selected: budget / r.

    Returns:
        is_selected: [b, L, M] bool, min(num_selected, complete blocks) of them True.
        margin: [b, L], gap between the last selected and the best refused score; infinite where
            no complete block is refused, and where both are exactly 0: no head of the indexer
            looks at either, and rounding does not change that.
    """
    num_blocks = scores.shape[-1]
    complete = (positions + 1) // ratio
    is_complete = torch.arange(num_blocks, device=scores.device) < complete[..., None]
    if num_blocks <= num_selected:
        return is_complete, scores.new_full(positions.shape, torch.inf)
    scores = scores.masked_fill(~is_complete, -torch.inf)
    best = scores.topk(num_selected + 1, dim=-1).values
    threshold = best[..., num_selected - 1 : num_selected]
    above = scores > threshold
    tied = scores == threshold
    room = num_selected - above.sum(-1, keepdim=True)
    is_selected = (above | (tied & (tied.cumsum(-1) <= room))) & is_complete
    last, refused = best[..., num_selected - 1], best[..., num_selected]
    is_certain = (complete <= num_selected) | ((last == 0) & (refused == 0))
    return is_selected, (last - refused).masked_fill(is_certain, torch.inf)


def selected_positions(
    is_selected: Tensor, positions: Tensor, ratio: int, num_selected: int
) -> tuple[Tensor, Tensor]:
    """Lists the positions of the selected blocks and of the tail.

    Args:
        is_selected: [b, L, M] bool.
        positions: [b, L] int64.
        ratio: r.
        num_selected: budget / r.

    Returns:
        listed: [b, L, num_selected * r + r - 1] int64, surplus entries 0.
        is_listed: the same shape, bool.
    """
    b, length, num_blocks = is_selected.shape
    rank = torch.where(is_selected, is_selected.cumsum(-1) - 1, num_selected)
    blocks = torch.full((b, length, num_selected + 1), -1, device=rank.device)
    numbers = torch.arange(num_blocks, device=rank.device).expand(b, length, -1)
    blocks = blocks.scatter_(2, rank, numbers)[..., :num_selected]
    steps = torch.arange(ratio, device=rank.device)
    inside = (blocks[..., None] * ratio + steps).flatten(2)
    first_tail = (positions + 1) // ratio * ratio
    tail = first_tail[..., None] + steps[: ratio - 1]
    tail = torch.where(tail <= positions[..., None], tail, -1)
    listed = torch.cat([inside, tail], dim=-1)
    return listed.clamp(min=0), listed >= 0


def selection_mask(is_selected: Tensor, positions: Tensor, ratio: int, num_keys: int) -> Tensor:
    """The same selection as a mask over positions.

    Args:
        is_selected: [b, L, M] bool.
        positions: [b, L] int64.
        ratio: r.
        num_keys: N.

    Returns:
        [b, L, N] bool.
    """
    place = torch.arange(num_keys, device=positions.device)
    block = (place // ratio).clamp(max=max(is_selected.shape[-1] - 1, 0))
    first_tail = ((positions + 1) // ratio * ratio)[..., None]
    in_tail = (place >= first_tail) & (place <= positions[..., None])
    if is_selected.shape[-1] == 0:
        return in_tail
    return in_tail | (is_selected[..., block] & (place < first_tail))
