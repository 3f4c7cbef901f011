"""What one layer sees of the caches: its own slice of each group's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AttentionState:
    """Keys and values of one sparse-attention layer, and the keys of its indexer.

    Attributes:
        group: name of the cache group whose slots address `keys` and `values`.
        index_group: name of the group whose slots address the index keys.
        keys: [slots, Hk, D], normalised and rotated.
        values: [slots, Hk, D].
        raw_index_keys: [slots, dI], neither normalised nor rotated.
        pooled_index_keys: [slots / r, dI], one per complete block, normalised and rotated.
    """

    group: str
    index_group: str
    keys: Tensor
    values: Tensor
    raw_index_keys: Tensor
    pooled_index_keys: Tensor


@dataclass(frozen=True)
class DeltaNetState:
    """Recurrent state of one delta-net layer: one committed state and the last window's inputs.

    Attributes:
        group: name of the cache group whose state slots address the tensors.
        recurrent: [slots, h, dk, dv], after the last committed row.
        conv: [slots, taps - 1 + P, channels], committed columns, then pending ones.
        keys: [slots, P, hk, dk], normalised keys of the pending rows.
        values: [slots, P, h, dv].
        log_decay: [slots, P, h].
        beta: [slots, P, h].
        kept_recurrent: [snapshots, h, dk, dv], states at block boundaries, or None.
        kept_conv: [snapshots, taps - 1, channels], or None.
    """

    group: str
    recurrent: Tensor
    conv: Tensor
    keys: Tensor
    values: Tensor
    log_decay: Tensor
    beta: Tensor
    kept_recurrent: Tensor | None = None
    kept_conv: Tensor | None = None


@dataclass(frozen=True)
class NgramState:
    """Convolution window of one layer of n-gram embeddings.

    Attributes:
        group: name of the cache group whose state slots address the tensor.
        conv: [slots, (taps - 1) * dilation + P, W], normalised gated values.
        kept_conv: [snapshots, (taps - 1) * dilation, W], windows at block boundaries, or None.
    """

    group: str
    conv: Tensor
    kept_conv: Tensor | None = None


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer; None where the layer has no such part."""

    attention: AttentionState | None = None
    delta_net: DeltaNetState | None = None
    ngram: NgramState | None = None
