"""The sparse-attention layers: keys, values and index keys in vLLM's blocks, our arithmetic on top.

A token's place in a block holds its keys, its values and its raw index key side by side. What the
indexer scores, the mean over each group of raw keys, is formed from them in every pass that has
more keys than its budget: a rejected draft leaves nothing behind but places that are written again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec

from outrider.models.qwen4_exp.sparse_attention import SparseAttention
from outrider.ops.sparse_attention import (
    attend,
    attend_listed,
    causal_mask,
    index_scores,
    select_blocks,
    selected_positions,
    selection_mask,
)
from outrider.vllm_plugin.row_windows import row_windows
from outrider.vllm_plugin.sharding import KeyValueLinear, check_divisible, check_shared

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from outrider.layers.rotary import RotaryEmbedding
    from outrider.models.qwen4_exp.config import Qwen4ExpConfig
    from outrider.models.qwen4_exp.sparse_attention import Angles


@dataclass(frozen=True)
class AttentionWindow:
    """Requests with the same number of rows, and where their past lies.

    Attributes:
        rows: [b, L] int64, rows of the flattened batch.
        positions: [b, L] int64, place of each row in its sequence.
        slots: [b, N] int64, place of every position in the blocks; the null block past the end.
    """

    rows: Tensor
    positions: Tensor
    slots: Tensor


@dataclass(frozen=True)
class SparseAttentionMetadata:
    """What the layers of a cache group read in a pass.

    Attributes:
        rows: [n] int64, rows that have a place to be written to.
        write_slots: [n] int64, those places.
        windows: every row of a request is in one of them.
    """

    rows: Tensor
    write_slots: Tensor
    windows: list[AttentionWindow]


class SparseAttentionMetadataBuilder(AttentionMetadataBuilder[SparseAttentionMetadata]):
    """Turns a block table into places, once for all layers of the group."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseAttentionMetadata:
        """The windows of a pass; see `AttentionMetadataBuilder.build`."""
        del common_prefix_len, fast_build
        m = common_attn_metadata
        starts = m.query_start_loc_cpu.tolist()
        num_rows = starts[-1]
        seq_lens = m.seq_lens.long()
        table = m.block_table_tensor.long()
        windows = []
        for window in row_windows(starts):
            lengths = seq_lens[window.requests]
            num_keys = int(lengths.max())
            length = window.rows.shape[1]
            positions = (lengths - length)[:, None] + torch.arange(length)
            places = torch.arange(num_keys)
            blocks = table[window.requests][:, places // self.block_size]
            slots = blocks * self.block_size + places % self.block_size
            slots = torch.where(places < lengths[:, None], slots, 0)
            windows.append(AttentionWindow(window.rows, positions, slots))
        write_slots = m.slot_mapping[:num_rows]
        rows = (write_slots >= 0).nonzero()[:, 0]
        return SparseAttentionMetadata(rows, write_slots[rows], windows)


class SparseAttentionBackend(AttentionBackend):
    """Names the builder and how large a token's place is; the layer computes by itself."""

    index_head_dim = 0
    """Width of a raw index key."""

    ratio = 1
    """Tokens whose index keys are pooled; they lie in one block."""

    @staticmethod
    def get_name() -> str:
        """For vLLM's log."""
        return "OUTRIDER_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        """Not asked for: the layer is no `Attention` of vLLM's."""
        return AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SparseAttentionMetadataBuilder]:
        """What finds the places."""
        return SparseAttentionMetadataBuilder

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, kv_cache_spec: object = None
    ) -> list[int | MultipleOf]:
        """Any number of whole groups of index keys."""
        del kv_cache_spec
        return [MultipleOf(cls.ratio)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """One place a token, for keys, values and the index key."""
        width = 2 * spec.num_kv_heads * spec.head_size + cls.index_head_dim
        return replace(spec, num_head_slots=1, state_content_bytes=width * spec.dtype.itemsize)


@lru_cache
def _backend(index_head_dim: int, ratio: int) -> type[SparseAttentionBackend]:
    """The backend of layers with such an indexer; vLLM asks its class, not the layer."""
    return type(
        SparseAttentionBackend.__name__,
        (SparseAttentionBackend,),
        {"index_head_dim": index_head_dim, "ratio": ratio},
    )


class ParallelSparseAttention(SparseAttention, AttentionLayerBase):
    """Sparse attention whose heads are divided among the ranks of a tensor-parallel group.

    Every rank has the whole indexer, so that all ranks select the same blocks.

    Args:
        config: of the whole model.
        rotary: the model's rotary table.
        vllm_config: vLLM's.
        prefix: the layer's name.
    """

    def __init__(
        self,
        config: Qwen4ExpConfig,
        rotary: RotaryEmbedding,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        tp_size = get_tensor_model_parallel_world_size()
        check_divisible("num_attention_heads", config.num_attention_heads, tp_size)
        check_shared("num_key_value_heads", config.num_key_value_heads, tp_size)
        heads = config.num_attention_heads // tp_size
        key_heads = max(1, config.num_key_value_heads // tp_size)
        super().__init__(
            replace(config, num_attention_heads=heads, num_key_value_heads=key_heads), rotary
        )
        hidden, dim, quant = config.hidden_size, config.head_dim, vllm_config.quant_config
        self.q_proj = ColumnParallelLinear(
            hidden,
            2 * config.num_attention_heads * dim,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.q_proj",
            return_bias=False,
        )
        for name in ("k_proj", "v_proj"):
            layer = KeyValueLinear(
                hidden,
                config.num_key_value_heads,
                dim,
                quant_config=quant,
                prefix=f"{prefix}.{name}",
            )
            setattr(self, name, layer)
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * dim,
            hidden,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.o_proj",
            return_bias=False,
        )
        self.dtype = vllm_config.model_config.dtype
        self.backend = _backend(config.indexer_head_dim, config.indexer_compress_ratio)
        self.layer_name = f"{prefix}.attn"
        self.cache: Tensor | None = None
        self.kv_cache = torch.empty(0)
        layers = vllm_config.compilation_config.static_forward_context
        assert self.layer_name not in layers, f"two layers of the name {self.layer_name}"
        layers[self.layer_name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        """What builds the metadata."""
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """What a block of the layer takes."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Takes the blocks, [blocks, 1, tokens, width]."""
        self.kv_cache = kv_cache
        self.cache = kv_cache[:, 0]

    def _split(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., width] to keys and values [..., Hk, D] and raw index keys [..., dI]."""
        width = self.num_kv_heads * self.head_dim
        keys, values, index_keys = places.split([width, width, self.indexer.head_dim], dim=-1)
        shape = (self.num_kv_heads, self.head_dim)
        return keys.unflatten(-1, shape), values.unflatten(-1, shape), index_keys

    def forward(self, hidden: Tensor, angles: Angles) -> Tensor:  # type: ignore[override]
        """[T, C] to [T, C]; writes the rows' keys, then attends."""
        query, gate, key, value = self._project(hidden, angles)
        raw_queries, raw_key = self.indexer.project(hidden)
        mixed = torch.zeros_like(query)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict) and self.layer_name in metadata and self.cache is not None:
            found: SparseAttentionMetadata = metadata[self.layer_name]
            block_size = self.cache.shape[1]
            written = torch.cat([key.flatten(1), value.flatten(1), raw_key], dim=-1)
            slots = found.write_slots
            self.cache[slots // block_size, slots % block_size] = written[found.rows]
            for window in found.windows:
                index_rows = (raw_queries, *angles)
                mixed[window.rows] = self._attend_rows(window, query[window.rows], index_rows)
        return self._output(mixed, gate)

    def _attend_rows(
        self, window: AttentionWindow, query: Tensor, index_rows: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Attends from [b, L, H, D] of a window; returns the same shape."""
        assert self.cache is not None, "the blocks are bound before a pass"
        block_size = self.cache.shape[1]
        places = self.cache[window.slots // block_size, window.slots % block_size]
        keys, values, index_keys = self._split(places)
        num_keys = window.slots.shape[1]
        if num_keys <= self.indexer.dense_limit:
            return attend(query, keys, values, causal_mask(window.positions, num_keys))
        is_selected = self._select(window, index_keys, index_rows)
        ratio, num_selected = self.indexer.ratio, self.indexer.num_selected
        num_listed = (num_selected + 1) * ratio - 1
        if query.shape[1] * num_listed > num_keys:
            mask = selection_mask(is_selected, window.positions, ratio, num_keys)
            return attend(query, keys, values, mask)
        listed, is_listed = selected_positions(is_selected, window.positions, ratio, num_selected)
        requests = torch.arange(len(listed))[:, None, None]
        return attend_listed(query, keys[requests, listed], values[requests, listed], is_listed)

    def _select(
        self, window: AttentionWindow, index_keys: Tensor, index_rows: tuple[Tensor, ...]
    ) -> Tensor:
        """Marks the index blocks that each row attends to, [b, L, M]."""
        indexer, ratio = self.indexer, self.indexer.ratio
        raw_queries, cos, sin = (rows[window.rows] for rows in index_rows)
        num_blocks = index_keys.shape[1] // ratio
        groups = index_keys[:, : num_blocks * ratio].unflatten(1, (num_blocks, ratio))
        first = (torch.arange(num_blocks) * ratio).expand(len(groups), -1)
        scores = index_scores(indexer.queries(raw_queries, (cos, sin)), indexer.pool(groups, first))
        is_selected, _ = select_blocks(scores, window.positions, ratio, indexer.num_selected)
        return is_selected
