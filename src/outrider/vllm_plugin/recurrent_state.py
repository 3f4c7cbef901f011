"""State of a request that has a size of its own whatever its length: where it lies, who reads it.

A slot holds everything that a layer needs to go on after one token: the recurrent state, the
columns that its convolution looks back at, the token ids that the n-gram hash looks back at. A
window of 1 + K rows writes a slot for each row, and the next window reads the slot of the last row
that was kept. Rollback is that choice, copying a state is copying a slot, and a window may be
shorter than K + 1 without a column being out of place.

All layers declare the same slot, so that vLLM's manager puts them into few groups of equal layers
in place of one group a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import MambaSpec

from outrider.vllm_plugin.architecture import read_architecture
from outrider.vllm_plugin.row_windows import row_windows

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

    from outrider.models.qwen4_exp.config import Qwen4ExpConfig

STATE_TYPE = MambaAttentionBackendEnum.GDN_ATTN
"""Under which of its names vLLM keeps the layers' states."""

COPY_FUNCTIONS = (get_temporal_copy_spec,)
"""How vLLM copies the state after an accepted row: the row's slot as a whole."""

_ALIGNMENT = 8  # bytes; the widest number in a slot


@dataclass(frozen=True)
class StatePart:
    """One tensor of a slot.

    Attributes:
        shape: without the slot's dimension.
        dtype: of its numbers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Rounded up to where the next part may start."""
        exact = prod(self.shape) * self.dtype.itemsize
        return -(-exact // _ALIGNMENT) * _ALIGNMENT


def delta_net_parts(config: Qwen4ExpConfig, tp_size: int, dtype: torch.dtype) -> list[StatePart]:
    """Columns of the convolution [taps - 1, channels] and the matrices [heads, dk, dv]."""
    heads = config.linear_num_value_heads // tp_size
    return [
        StatePart((config.linear_conv_kernel_dim - 1, config.linear_conv_dim // tp_size), dtype),
        StatePart((heads, config.linear_key_head_dim, config.linear_value_head_dim), torch.float32),
    ]


def ngram_parts(config: Qwen4ExpConfig, dtype: torch.dtype) -> list[StatePart]:
    """Columns of the convolution [(taps - 1) * dilation, W] and token ids [ngram_size - 1]."""
    history = (config.ple_conv_kernel_size - 1) * config.ngram_size
    return [
        StatePart((history, config.stream_width), dtype),
        StatePart((config.ngram_size - 1,), torch.int64),
    ]


def slot_bytes(vllm_config: VllmConfig) -> int:
    """Size of a slot of any layer: the largest that a layer needs."""
    config, dtype = read_architecture(vllm_config), vllm_config.model_config.dtype
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    kinds = [delta_net_parts(config, tp_size, dtype)]
    if config.ple_layer_ids:
        kinds.append(ngram_parts(config, dtype))
    return max(sum(part.num_bytes for part in parts) for parts in kinds)


def state_spec(vllm_config: VllmConfig) -> MambaSpec:
    """What the cache manager is told of a layer's state before there are layers."""
    return MambaSpec(shapes=((slot_bytes(vllm_config),),), dtypes=(torch.int8,), block_size=-1)


class StateLayer(MambaBase):
    """A layer with a slot for each request; a module inherits it.

    Attributes:
        states: the parts of the slots, [slots, *shape] each; empty until vLLM has given them.
    """

    states: tuple[Tensor, ...] = ()

    def declare_state(self, vllm_config: VllmConfig, prefix: str, parts: list[StatePart]) -> None:
        """Registers the layer under its name, with the parts of its slot."""
        self.layer_name = prefix
        self._parts = parts
        self._slot_bytes = slot_bytes(vllm_config)
        self.kv_cache: tuple[Tensor, ...] = ()
        layers = vllm_config.compilation_config.static_forward_context
        assert prefix not in layers, f"two layers of the name {prefix}"
        layers[prefix] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Takes the pages, [slots, 1, 1, bytes] int8, apart."""
        pages = kv_cache.squeeze(dim=(1, 2))
        states, start = [], 0
        for part in self._parts:
            count = prod(part.shape) * part.dtype.itemsize
            numbers = pages[:, start : start + count].view(part.dtype)
            states.append(numbers.view(-1, *part.shape))
            start += part.num_bytes
        self.kv_cache = (pages,)
        self.states = tuple(states)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """The slot as bytes."""
        return ((self._slot_bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Of the slot as bytes."""
        return (torch.int8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The kind of state, as vLLM calls it."""
        return STATE_TYPE

    def get_attn_backend(self) -> type[AttentionBackend]:
        """What builds the metadata."""
        return StateBackend

    def windows(self) -> list[StateWindow]:
        """Who reads and writes which slot in this pass; nobody where vLLM measures its memory."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or self.layer_name not in metadata or not self.states:
            return []
        found: list[StateWindow] = metadata[self.layer_name].windows
        return found


@dataclass(frozen=True)
class StateWindow:
    """Requests with the same number of rows, and their slots.

    Attributes:
        rows: [b, L] int64, rows of the flattened batch.
        read_slots: [b] int64, the state before the first row.
        has_state: [b] bool, False where the first row is the first of its request.
        write_slots: [b, L] int64 where each row's state is kept, [b, 1] where the last one's is.
    """

    rows: Tensor
    read_slots: Tensor
    has_state: Tensor
    write_slots: Tensor

    @property
    def keeps_every_row(self) -> bool:
        """Whether the state after each of its rows is kept."""
        return self.write_slots.shape[1] == self.rows.shape[1]

    def read(self, states: Tensor) -> Tensor:
        """The state before the window [b, ...] of [slots, ...]: zeros where there is none."""
        found = states[self.read_slots]
        # A select: the slot of a request that has no state yet may hold anything.
        return torch.where(self.has_state.view(-1, *[1] * (found.dim() - 1)), found, 0)


@dataclass(frozen=True)
class StateMetadata:
    """What the layers of a cache group read in a pass."""

    windows: list[StateWindow]


class StateMetadataBuilder(GDNAttentionMetadataBuilder):
    """Finds the slots of a batch. vLLM gives what it knows of drafts to builders of this kind."""

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> StateMetadata:
        """The slots of a pass.

        Args:
            common_prefix_len: always 0 in this version of vLLM.
            common_attn_metadata: rows, lengths and the block table of this cache group.
            num_accepted_tokens: [B] rows of the last window that were kept, the first one among
                them; None without drafts.
            num_decode_draft_tokens_cpu: [B] drafts among the rows, -1 for a piece of a prompt; None
                without drafts.
            fast_build: of no meaning here.
        """
        del common_prefix_len, fast_build
        m = common_attn_metadata
        table = mamba_get_block_table_tensor(
            m.block_table_tensor,
            m.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        ).long()
        starts = m.query_start_loc_cpu.tolist()
        num_requests = len(starts) - 1
        is_verified = [False] * num_requests
        read_slots = table[:num_requests, 0]
        if num_accepted_tokens is not None and num_decode_draft_tokens_cpu is not None:
            is_verified = (num_decode_draft_tokens_cpu[:num_requests] >= 0).tolist()
            kept = num_accepted_tokens[:num_requests, None].long() - 1
            read_slots = table[:num_requests].gather(1, kept.clamp(min=0))[:, 0]
        lengths = m.query_start_loc_cpu.diff()
        has_state = m.seq_lens[:num_requests] > lengths
        windows = []
        for window in row_windows(starts, is_verified):
            chosen = window.requests
            num_kept = window.rows.shape[1] if is_verified[int(chosen[0])] else 1
            windows.append(
                StateWindow(
                    window.rows, read_slots[chosen], has_state[chosen], table[chosen, :num_kept]
                )
            )
        return StateMetadata(windows)


class StateBackend(GDNAttentionBackend):
    """Names the builder; the layers compute by themselves."""

    @staticmethod
    def get_name() -> str:
        """For vLLM's log."""
        return "OUTRIDER_STATE"

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """What finds the slots."""
        return StateMetadataBuilder
