"""Grouped-query attention over a padded window, by mask or over listed positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Of one call's mask, over the query heads of a key head: torch makes floats of it.
_MAX_MASK_ELEMENTS = 1 << 27


def causal_mask(positions: Tensor, num_keys: int) -> Tensor:
    """[b, L] places to the [b, L, N] mask of the positions each query sees."""
    return torch.arange(num_keys, device=positions.device) <= positions[..., None]


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention over the keys that the mask names.

    The query heads of one key head are laid side by side as rows, so that keys and values are
    read once and never repeated.

    Args:
        query: [b, L, H, D].
        keys: [b, N, Hk, D].
        values: [b, N, Hk, D].
        mask: [b, L, N] bool, at least one True in a row.

    Returns:
        [b, L, H, D].
    """
    b, length, heads, dim = query.shape
    key_heads = keys.shape[2]
    group = heads // key_heads
    max_length = max(1, _MAX_MASK_ELEMENTS // (b * group * keys.shape[1]))
    if length > max_length:
        # Rows know nothing of each other.
        parts = zip(query.split(max_length, 1), mask.split(max_length, 1), strict=True)
        return torch.cat([attend(rows, keys, values, seen) for rows, seen in parts], dim=1)
    folded = query.view(b, length, key_heads, group, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(b, key_heads, group * length, dim)
    if group > 1 and length > 1:
        mask = mask.repeat(1, group, 1)
    output = F.scaled_dot_product_attention(
        folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask[:, None]
    )
    output = output.view(b, key_heads, group, length, dim).permute(0, 3, 1, 2, 4)
    return output.reshape(b, length, heads, dim)


def attend_listed(query: Tensor, keys: Tensor, values: Tensor, is_listed: Tensor) -> Tensor:
    """Attention of each query over keys gathered for it alone.

    Args:
        query: [b, L, H, D].
        keys: [b, L, M, Hk, D].
        values: [b, L, M, Hk, D].
        is_listed: [b, L, M] bool, at least one True in a row.

    Returns:
        [b, L, H, D].
    """
    b, length, heads, dim = query.shape
    num_listed, key_heads = keys.shape[2], keys.shape[3]
    rows = b * length
    output = attend(
        query.reshape(rows, 1, heads, dim),
        keys.reshape(rows, num_listed, key_heads, dim),
        values.reshape(rows, num_listed, key_heads, dim),
        is_listed.reshape(rows, 1, num_listed),
    )
    return output.view(b, length, heads, dim)
