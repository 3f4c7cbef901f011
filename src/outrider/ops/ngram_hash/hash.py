"""The n-gram hash over padded windows."""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_rows(
    token_ids: Tensor,
    context_ids: Tensor,
    multipliers: Tensor,
    head_sizes: Tensor,
    head_offsets: Tensor,
    eos_token_id: int,
) -> Tensor:
    """Table rows that each position reads; the rule is in `ngram_rows_naive`.

    Products of ids and multipliers stay below 2**63 by the choice of the multipliers, so int64
    arithmetic is exact and remainders are not negative.

    Args:
        token_ids: [b, L] int64.
        context_ids: [b, n - 1] int64, the ids before the first one, end-of-text before the start.
        multipliers: [n] int64.
        head_sizes: [heads] int64.
        head_offsets: [heads] int64.
        eos_token_id: what stands in for predecessors across a document's end.

    Returns:
        [b, L, heads] int64.
    """
    size, length = multipliers.shape[0], token_ids.shape[1]
    heads_per_gram = head_sizes.shape[0] // (size - 1)
    history = torch.cat([context_ids, token_ids], dim=1)
    mixed = token_ids * multipliers[0]
    ended = torch.zeros_like(token_ids, dtype=torch.bool)
    hashes = []
    for back in range(1, size):
        previous = history[:, size - 1 - back : size - 1 - back + length]
        previous = previous.masked_fill(ended, eos_token_id)
        ended = ended | (previous == eos_token_id)
        mixed = mixed ^ (previous * multipliers[back])
        hashes.append(mixed)
    per_head = torch.stack(hashes, dim=-1).repeat_interleave(heads_per_gram, dim=-1)
    return per_head % head_sizes + head_offsets
