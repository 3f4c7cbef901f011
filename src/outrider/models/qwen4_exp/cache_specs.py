"""The cache groups of a Qwen4-Exp model, and each layer's slice of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.cache.groups import CacheGroup, GroupSpec, Rollback, TensorSpec
from outrider.cache.layer_states import AttentionState, DeltaNetState, LayerStates, NgramState

if TYPE_CHECKING:
    from outrider.models.qwen4_exp.config import Qwen4ExpConfig

TARGET_ATTENTION = "target_attention"
TARGET_INDEX = "target_index"
MTP_ATTENTION = "mtp_attention"
MTP_INDEX = "mtp_index"
DELTA_NET = "delta_net"
NGRAM = "ngram"

TARGET_GROUPS = (TARGET_ATTENTION, TARGET_INDEX, DELTA_NET, NGRAM)
MTP_GROUPS = (MTP_ATTENTION, MTP_INDEX)


def cache_specs(
    config: Qwen4ExpConfig, num_mtp_layers: int, num_pending_rows: int
) -> list[GroupSpec]:
    """Declares every kind of state that rolls back by itself; n-gram ids are regathered.

    Args:
        config: the model's configuration.
        num_mtp_layers: layers of the head; 0 without one.
        num_pending_rows: P, draft rows the recurrent states keep.
    """
    specs = _attention_specs(config, len(config.indexed_layer_indices), TARGET_GROUPS[:2])
    specs += _attention_specs(config, num_mtp_layers, MTP_GROUPS)
    heads, key_dim, value_dim = (
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    replay, pending = Rollback.REPLAY, num_pending_rows
    columns = config.linear_conv_kernel_dim - 1 + pending
    delta_net = (
        TensorSpec("recurrent", (heads, key_dim, value_dim), replay),
        TensorSpec("conv", (columns, config.linear_conv_dim), replay),
        TensorSpec("keys", (pending, config.linear_num_key_heads, key_dim), replay),
        TensorSpec("values", (pending, heads, value_dim), replay),
        TensorSpec("log_decay", (pending, heads), replay),
        TensorSpec("beta", (pending, heads), replay),
    )
    specs.append(GroupSpec(DELTA_NET, False, len(config.linear_layer_indices), delta_net))
    columns = (config.ple_conv_kernel_size - 1) * config.ngram_size + pending
    ngram = (TensorSpec("conv", (columns, config.stream_width), replay),)
    specs.append(GroupSpec(NGRAM, False, len(config.ple_layer_indices), ngram))
    return [spec for spec in specs if spec.num_layers]


def _attention_specs(
    config: Qwen4ExpConfig, num_layers: int, names: tuple[str, ...]
) -> list[GroupSpec]:
    head = (config.num_key_value_heads, config.head_dim)
    key = (config.indexer_head_dim,)
    ratio = config.indexer_compress_ratio
    attention = (
        TensorSpec("keys", head, Rollback.TRUNCATE),
        TensorSpec("values", head, Rollback.TRUNCATE),
    )
    index = (
        TensorSpec("raw_index_keys", key, Rollback.TRUNCATE),
        TensorSpec("pooled_index_keys", key, Rollback.REGATHER, tokens_per_slot=ratio),
    )
    return [
        GroupSpec(names[0], True, num_layers, attention),
        GroupSpec(
            names[1],
            True,
            num_layers,
            index,
            ratio=ratio,
            dense_limit=config.index_dense_limit,
        ),
    ]


def _attention_state(
    groups: dict[str, CacheGroup], names: tuple[str, ...], index: int
) -> AttentionState:
    return AttentionState(
        group=names[0],
        index_group=names[1],
        **groups[names[0]].layer(index),
        **groups[names[1]].layer(index),
    )


def target_layer_states(config: Qwen4ExpConfig, groups: dict[str, CacheGroup]) -> list[LayerStates]:
    """The states of each layer of the trunk."""
    attention = {layer: i for i, layer in enumerate(config.indexed_layer_indices)}
    linear = {layer: i for i, layer in enumerate(config.linear_layer_indices)}
    ngram = {layer: i for i, layer in enumerate(config.ple_layer_indices)}
    return [
        LayerStates(
            attention=_attention_state(groups, TARGET_GROUPS[:2], attention[layer])
            if layer in attention
            else None,
            delta_net=DeltaNetState(DELTA_NET, **groups[DELTA_NET].layer(linear[layer]))
            if layer in linear
            else None,
            ngram=NgramState(NGRAM, **groups[NGRAM].layer(ngram[layer]))
            if layer in ngram
            else None,
        )
        for layer in range(config.num_hidden_layers)
    ]


def mtp_layer_states(num_mtp_layers: int, groups: dict[str, CacheGroup]) -> list[LayerStates]:
    """The states of each layer of the head."""
    return [
        LayerStates(attention=_attention_state(groups, MTP_GROUPS, index))
        for index in range(num_mtp_layers)
    ]
