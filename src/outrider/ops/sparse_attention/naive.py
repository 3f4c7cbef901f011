"""Reference of sparse attention: one query at a time, in the words of the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def select_blocks_naive(scores: list[float], num_selected: int) -> list[int]:
    """The `num_selected` best blocks, ascending; of equal scores the lowest block wins."""
    order = sorted(range(len(scores)), key=lambda block: (-scores[block], block))
    return sorted(order[:num_selected])


def selected_positions_naive(
    position: int,
    index_query: Tensor,
    raw_keys: Tensor,
    pool: Callable[[Tensor, int], Tensor],
    ratio: int,
    budget: int,
) -> list[int]:
    """The positions that one query attends to.

    Args:
        position: the query's place; it sees positions 0..position.
        index_query: [heads, dI], normalised and rotated.
        raw_keys: [N, dI], N > position.
        pool: turns (mean of a block's raw keys [dI], position of its first token) into the
            block's key [dI].
        ratio: tokens a block.
        budget: tokens that blocks may contribute.
    """
    visible = position + 1
    blocks = visible // ratio
    scores = []
    for block in range(blocks):
        key = pool(raw_keys[block * ratio : (block + 1) * ratio].mean(0), block * ratio)
        scores.append(float((index_query @ key).relu().sum()))
    chosen = select_blocks_naive(scores, min(budget // ratio, blocks))
    positions = [block * ratio + i for block in chosen for i in range(ratio)]
    return positions + list(range(blocks * ratio, visible))


def attention_naive(query: Tensor, keys: Tensor, values: Tensor, positions: list[int]) -> Tensor:
    """Attention of one query over the positions named.

    Args:
        query: [H, D].
        keys: [N, Hk, D].
        values: [N, Hk, D].
        positions: which of the N are attended to.

    Returns:
        [H, D].
    """
    group = query.shape[0] // keys.shape[1]
    outputs = []
    for head in range(query.shape[0]):
        k = keys[positions, head // group]
        v = values[positions, head // group]
        weights = torch.softmax(k @ query[head] / query.shape[-1] ** 0.5, dim=0)
        outputs.append(weights @ v)
    return torch.stack(outputs)


def attend_sequence_naive(
    query: Tensor, keys: list[Tensor], values: list[Tensor], depths: list[int]
) -> Tensor:
    """Dense attention of the deepest of some draft depths, over the rows that each row names.

    Row p of depth j attends to the rows of the first depth, d, from row d up to p - (j - d), and
    to row p - (j - e) of each deeper depth e, itself among them.

    Args:
        query: [T, H, D], of depth depths[-1].
        keys: one [T, Hk, D] a depth.
        values: one [T, Hk, D] a depth.
        depths: ascending.

    Returns:
        [T, H, D].
    """
    length, first, last = len(query), depths[0], depths[-1]
    outputs = []
    for p in range(length):
        named = [(0, row) for row in range(first, p - (last - first) + 1)]
        named += [(i, p - (last - d)) for i, d in enumerate(depths) if i and p >= last - d]
        if first == last and p < first:
            named = [(0, p)]
        key = torch.stack([keys[i][row] for i, row in named])
        value = torch.stack([values[i][row] for i, row in named])
        outputs.append(attention_naive(query[p], key, value, list(range(len(named)))))
    return torch.stack(outputs)
