"""Embedding of hashed n-grams: its table divided among the ranks, its history in slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.ngram_embedding import NgramEmbedding, NgramTable
from outrider.ops.causal_conv import causal_conv
from outrider.vllm_plugin.norm import widen_norms
from outrider.vllm_plugin.recurrent_state import StateLayer, StateWindow, ngram_parts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

    from outrider.models.qwen4_exp.config import Qwen4ExpConfig

_HASH_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


class ParallelNgramTable(NgramTable):
    """The hashed table, its rows divided among the ranks.

    Args:
        config: the model's configuration.
        ple_index: rank of the layer among the layers with n-gram embeddings.
        prefix: the table's name.
    """

    def __init__(self, config: Qwen4ExpConfig, ple_index: int, prefix: str) -> None:
        with torch.device("meta"):
            super().__init__(config, ple_index)
        for name, numbers in (
            ("layer_multipliers", config.ngram_multipliers(ple_index)),
            ("ngram_heads_vocab_sizes", config.ngram_head_vocab_sizes(ple_index)),
            ("ngram_heads_offsets", config.ngram_head_offsets(ple_index)),
        ):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.int64))
        self.num_table_rows = config.ngram_table_rows(ple_index)
        self.num_loaded_rows = 0
        self.rows_per_shard = -(-self.num_table_rows // config.split_ngram_parts)
        table = VocabParallelEmbedding(
            self.num_table_rows, config.ngram_head_dim, prefix=f"{prefix}.ngram_embedding"
        )
        self.ngram_embedding = table
        self.first_row: int = table.shard_indices.org_vocab_start_index
        self.end_row: int = table.shard_indices.org_vocab_end_index

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the table, whole or in the shards of a checkpoint, and compares the hash.

        Called as often as other tensors stand between these in the checkpoint's files.

        Returns:
            The table's name once all of its rows are here, for vLLM's check of what is missing.

        Raises:
            CheckpointError: the checkpoint hashes otherwise than config.json says, or its shards
                are not those that config.json counts.
        """
        for name, loaded in weights:
            if name in _HASH_BUFFERS:
                if not torch.equal(getattr(self, name), loaded):
                    raise CheckpointError(f"{name}: not the numbers that config.json leads to")
                continue
            shard = name.split(".")[1]
            start = 0
            if shard.startswith("shard_"):
                start = int(shard.removeprefix("shard_")) * self.rows_per_shard
                # They come in any order, and none can be placed by the lengths of others.
                if len(loaded) != min(self.rows_per_shard, self.num_table_rows - start):
                    raise CheckpointError(
                        f"{name} has {len(loaded)} rows: on vLLM a table of {self.num_table_rows} "
                        f"is in shards of {self.rows_per_shard}, as split_ngram_parts says"
                    )
            self._load_rows(start, loaded)
            self.num_loaded_rows += len(loaded)
        return {"ngram_embedding.weight"} if self.num_loaded_rows == self.num_table_rows else set()

    def _load_rows(self, start: int, loaded: Tensor) -> None:
        """Copies what of the rows start, start + 1, ... belongs to this rank."""
        first, end = max(start, self.first_row), min(start + len(loaded), self.end_row)
        if first < end:
            mine = self.ngram_embedding.weight.data[first - self.first_row : end - self.first_row]
            mine.copy_(loaded[first - start : end - start])


class ParallelNgramEmbedding(NgramEmbedding, StateLayer):
    """What the n-grams add to the streams before a layer.

    Args:
        config: the model's configuration.
        ple_index: rank of the layer among the layers with n-gram embeddings.
        vllm_config: vLLM's.
        prefix: the layer's name.
    """

    def __init__(
        self, config: Qwen4ExpConfig, ple_index: int, vllm_config: VllmConfig, prefix: str
    ) -> None:
        nn.Module.__init__(self)
        with torch.device("meta"):
            NgramEmbedding.__init__(self, config, ple_index)
        # Before memory is taken: the table of a real model is larger than most machines.
        del self.ple_embedding
        self.to_empty(device="cpu")
        self.ple_embedding = ParallelNgramTable(config, ple_index, f"{prefix}.ple_embedding")
        widen_norms(self)
        self.declare_state(vllm_config, prefix, ngram_parts(config, vllm_config.model_config.dtype))

    def forward(self, streams: Tensor, token_ids: Tensor) -> Tensor:  # type: ignore[override]
        """What to add to the streams: [T, W] for [T, W] and [T] ids; the states are modified."""
        added = torch.zeros_like(streams)
        for window in self.windows():
            rows = window.rows
            added[rows] = self._add(window, streams[rows], token_ids[rows].long())
        return added

    def _add(self, window: StateWindow, streams: Tensor, token_ids: Tensor) -> Tensor:
        """[b, L, W] for the rows of a window, whose slots are written."""
        conv, context = self.states
        eos = self.ple_embedding.eos_token_id
        context_ids = torch.where(window.has_state[:, None], context[window.read_slots], eos)
        value = self._gated_value(self.ple_embedding(token_ids, context_ids), streams)
        columns = torch.cat([window.read(conv), self.norm_conv(value)], dim=1)
        ids = torch.cat([context_ids, token_ids], dim=1)
        length = token_ids.shape[1]
        first = 0 if window.keeps_every_row else length - 1
        for place, row in enumerate(range(first, length)):
            slots = window.write_slots[:, place]
            conv[slots] = columns[:, row + 1 : row + 1 + self.history]
            context[slots] = ids[:, row + 1 : row + 1 + self.context_size]
        mixed = causal_conv(columns.float(), self.conv1d.weight[:, 0].float(), self.dilation)
        return value + F.silu(mixed).to(value.dtype)
