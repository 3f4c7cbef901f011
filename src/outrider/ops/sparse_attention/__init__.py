"""Attention over the blocks an indexer selects."""

from outrider.ops.sparse_attention.attend import attend, attend_listed, causal_mask
from outrider.ops.sparse_attention.naive import (
    attend_sequence_naive,
    attention_naive,
    select_blocks_naive,
    selected_positions_naive,
)
from outrider.ops.sparse_attention.select import (
    index_scores,
    select_blocks,
    selected_positions,
    selection_mask,
)
from outrider.ops.sparse_attention.sequence import attend_sequence

__all__ = [
    "attend",
    "attend_listed",
    "attend_sequence",
    "attend_sequence_naive",
    "attention_naive",
    "causal_mask",
    "index_scores",
    "select_blocks",
    "select_blocks_naive",
    "selected_positions",
    "selected_positions_naive",
    "selection_mask",
]
