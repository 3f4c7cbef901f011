"""Per-layer embedding of hashed n-grams (PLE), gated by the streams and convolved over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.layers.norm import RMSNorm
from outrider.models.qwen4_exp.gated_delta_net import Conv1dWeight
from outrider.ops.causal_conv import causal_conv, causal_conv_silu, roll_window, windows_after
from outrider.ops.ngram_hash import ngram_rows

if TYPE_CHECKING:
    from outrider.batch import ForwardBatch
    from outrider.cache.layer_states import NgramState
    from outrider.models.qwen4_exp.config import Qwen4ExpConfig

_SMALLEST_DOT = 1e-6  # bound under the square root, from the architecture


class NgramTable(nn.Module):
    """The hashed table and the integers that address it.

    Args:
        config: the model's configuration.
        ple_index: rank of the layer among the layers with n-gram embeddings.
    """

    def __init__(self, config: Qwen4ExpConfig, ple_index: int) -> None:
        super().__init__()
        self.eos_token_id = config.eos_token_id or 0
        self.ngram_embedding = nn.Embedding(
            config.ngram_table_rows(ple_index), config.ngram_head_dim
        )
        self.layer_multipliers: Tensor
        self.ngram_heads_vocab_sizes: Tensor
        self.ngram_heads_offsets: Tensor
        for name, numbers in (
            ("layer_multipliers", config.ngram_multipliers(ple_index)),
            ("ngram_heads_vocab_sizes", config.ngram_head_vocab_sizes(ple_index)),
            ("ngram_heads_offsets", config.ngram_head_offsets(ple_index)),
        ):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.int64))

    def forward(self, token_ids: Tensor, context_ids: Tensor) -> Tensor:
        """[b, L] ids after [b, ngram_size - 1] context ids to [b, L, ple_embed_dim]."""
        rows = ngram_rows(
            token_ids,
            context_ids,
            self.layer_multipliers,
            self.ngram_heads_vocab_sizes,
            self.ngram_heads_offsets,
            self.eos_token_id,
        )
        return self.ngram_embedding(rows).flatten(-2)


class NgramEmbedding(nn.Module):
    """What the n-grams add to the streams before a layer."""

    def __init__(self, config: Qwen4ExpConfig, ple_index: int) -> None:
        super().__init__()
        hidden, width, eps = config.hidden_size, config.stream_width, config.rms_norm_eps
        self.num_streams = config.hc_count
        self.hidden_size = hidden
        self.dilation = config.ngram_size
        self.history = (config.ple_conv_kernel_size - 1) * config.ngram_size
        self.context_size = config.ngram_size - 1
        self.ple_embedding = NgramTable(config, ple_index)
        self.key_proj = nn.Linear(config.ple_embed_dim, width, bias=False)
        self.value_proj = nn.Linear(config.ple_embed_dim, hidden, bias=False)
        self.norm_key = RMSNorm(width, eps, group_size=hidden)
        self.norm_query = RMSNorm(width, eps, group_size=hidden)
        self.norm_conv = RMSNorm(width, eps, group_size=hidden)
        self.conv1d = Conv1dWeight(width, config.ple_conv_kernel_size)

    def _gated_value(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """[..., P] embeddings and [..., W] streams to gated values [..., W]."""
        key = self.norm_key(self.key_proj(embedded)).unflatten(-1, (self.num_streams, -1))
        query = self.norm_query(streams).unflatten(-1, (self.num_streams, -1))
        dot = (key * query).sum(-1) * self.hidden_size**-0.5
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=_SMALLEST_DOT).sqrt())
        return (gate[..., None] * self.value_proj(embedded)[..., None, :]).flatten(-2)

    def forward(self, streams: Tensor, batch: ForwardBatch, state: NgramState) -> Tensor:
        """What to add to the streams: [T, W] for [T, W]; the state is modified."""
        added = None
        for window in batch.windows:
            embedded = self.ple_embedding(window.gather(batch.token_ids), window.context_ids)
            value = self._gated_value(embedded, window.gather(streams))
            slots = window.state_slots[state.group]
            columns, stored = roll_window(
                state.conv[slots],
                self.norm_conv(value),
                window.num_kept_rows,
                window.num_certain_rows,
                self.history,
            )
            state.conv[slots] = stored
            if (wanted := window.snapshots) is not None and state.kept_conv is not None:
                state.kept_conv[wanted.slots] = windows_after(
                    columns, wanted.requests, wanted.num_rows, self.history
                )
            mixed = value + F.silu(causal_conv(columns, self.conv1d.weight[:, 0], self.dilation))
            added = window.scatter(mixed, added, batch.num_rows)
        assert added is not None, "a batch has at least one window"
        return added

    def forward_sequence(self, streams: Tensor, token_ids: Tensor) -> Tensor:
        """The same for whole sequences [B, T, W], [B, T], differentiable."""
        context = token_ids.new_full(
            (token_ids.shape[0], self.context_size), self.ple_embedding.eos_token_id
        )
        value = self._gated_value(self.ple_embedding(token_ids, context), streams)
        columns = self.norm_conv.forward_sequence(value)
        return value + causal_conv_silu(columns, self.conv1d.weight[:, 0], self.dilation)
