"""Folds the pending rows of recurrent states without running a window.

A pass folds them on its way (`GatedDeltaNet.forward`); this is for when no pass follows: when a
request's state must stand for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.ops.causal_conv import roll_window
from outrider.ops.gated_delta_rule import chunk_gated_delta_rule

if TYPE_CHECKING:
    from outrider.cache.layer_states import DeltaNetState, NgramState


def materialize_delta_net(
    state: DeltaNetState, slots: Tensor, num_kept_rows: Tensor, history: int
) -> None:
    """Folds the kept pending rows into the recurrent state and the convolution window.

    Args:
        state: of one layer; modified.
        slots: [b] int64.
        num_kept_rows: [b] int64, 0..P.
        history: committed columns of the convolution window.
    """
    _materialize_conv(state.conv, slots, num_kept_rows, history)
    pending = state.keys.shape[1]
    if pending == 0:
        return
    is_kept = torch.arange(pending, device=slots.device) < num_kept_rows[:, None]
    stores = (state.keys, state.values, state.log_decay, state.beta)
    k, v, g, beta = (
        torch.where(is_kept.view(*is_kept.shape, *[1] * (store.dim() - 2)), store[slots], 0.0)
        for store in stores
    )
    k = k.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    _, recurrent = chunk_gated_delta_rule(k[:, :0], k, v, g, beta, state.recurrent[slots])
    state.recurrent[slots] = recurrent


def materialize_ngram(
    state: NgramState, slots: Tensor, num_kept_rows: Tensor, history: int
) -> None:
    """Drops the rejected columns of an n-gram convolution window; arguments as above."""
    _materialize_conv(state.conv, slots, num_kept_rows, history)


def _materialize_conv(conv: Tensor, slots: Tensor, num_kept_rows: Tensor, history: int) -> None:
    window = conv[slots]
    none = torch.zeros_like(num_kept_rows)
    _, stored = roll_window(window, window[:, :0], num_kept_rows, none, history)
    conv[slots] = stored
