"""The cache groups of a Qwen4-Exp model, and each layer's slice of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.cache.groups import CacheGroup, GroupSpec, Rollback, TensorSpec
from outrider.cache.layer_states import AttentionState, DeltaNetState, LayerStates, NgramState
from outrider.cache.snapshot_pool import LAST_STREAMS

if TYPE_CHECKING:
    from torch import Tensor

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
    # Row p of the head is made of the streams X_p and of the token x_{p+1}.
    specs += _attention_specs(config, num_mtp_layers, MTP_GROUPS, reads_next_token=True)
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


def snapshot_specs(config: Qwen4ExpConfig, num_mtp_layers: int) -> list[GroupSpec]:
    """What is kept of a request at a block boundary, so that another one can begin there.

    Args:
        config: the model's configuration.
        num_mtp_layers: layers of the head; where there are some, the streams of the row before
            the boundary are kept too, from which the head's row is built again with the token that
            comes next.
    """
    specs = [spec for spec in cache_specs(config, 0, 0) if not spec.is_paged]
    if num_mtp_layers:
        streams = TensorSpec("streams", (config.stream_width,), Rollback.REGATHER)
        specs.append(GroupSpec(LAST_STREAMS, False, 1, (streams,)))
    return specs


def _attention_specs(
    config: Qwen4ExpConfig,
    num_layers: int,
    names: tuple[str, ...],
    *,
    reads_next_token: bool = False,
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
        GroupSpec(names[0], True, num_layers, attention, reads_next_token=reads_next_token),
        GroupSpec(
            names[1],
            True,
            num_layers,
            index,
            ratio=ratio,
            dense_limit=config.index_dense_limit,
            reads_next_token=reads_next_token,
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


def target_layer_states(
    config: Qwen4ExpConfig,
    groups: dict[str, CacheGroup],
    snapshots: dict[str, CacheGroup] | None = None,
) -> list[LayerStates]:
    """The states of each layer of the trunk.

    Args:
        config: the model's configuration.
        groups: of the cache manager.
        snapshots: where states at block boundaries are kept, if they are.
    """
    kept = snapshots or {}
    attention = {layer: i for i, layer in enumerate(config.indexed_layer_indices)}
    linear = {layer: i for i, layer in enumerate(config.linear_layer_indices)}
    ngram = {layer: i for i, layer in enumerate(config.ple_layer_indices)}
    return [
        LayerStates(
            attention=_attention_state(groups, TARGET_GROUPS[:2], attention[layer])
            if layer in attention
            else None,
            delta_net=DeltaNetState(
                DELTA_NET,
                **groups[DELTA_NET].layer(linear[layer]),
                **_kept_layer(kept, DELTA_NET, linear[layer], ("recurrent", "conv")),
            )
            if layer in linear
            else None,
            ngram=NgramState(
                NGRAM,
                **groups[NGRAM].layer(ngram[layer]),
                **_kept_layer(kept, NGRAM, ngram[layer], ("conv",)),
            )
            if layer in ngram
            else None,
        )
        for layer in range(config.num_hidden_layers)
    ]


def _kept_layer(
    snapshots: dict[str, CacheGroup], name: str, index: int, tensors: tuple[str, ...]
) -> dict[str, Tensor]:
    """A layer's slice of the snapshots, under the names of the fields that hold it."""
    if name not in snapshots:
        return {}
    layer = snapshots[name].layer(index)
    return {f"kept_{tensor}": layer[tensor] for tensor in tensors}


def mtp_layer_states(num_mtp_layers: int, groups: dict[str, CacheGroup]) -> list[LayerStates]:
    """The states of each layer of the head."""
    return [
        LayerStates(attention=_attention_state(groups, MTP_GROUPS, index))
        for index in range(num_mtp_layers)
    ]
