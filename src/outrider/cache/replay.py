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
    from collections.abc import Mapping, Sequence

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
    if state.keys.shape[1]:
        stores = (state.keys, state.values, state.log_decay, state.beta)
        pending = [store[slots] for store in stores]
        state.recurrent[slots] = _fold_rows(state.recurrent[slots], pending, num_kept_rows)


def materialize_ngram(
    state: NgramState, slots: Tensor, num_kept_rows: Tensor, history: int
) -> None:
    """Drops the rejected columns of an n-gram convolution window; arguments as above."""
    _materialize_conv(state.conv, slots, num_kept_rows, history)


def fold_pending(
    tensors: Mapping[str, Tensor], slots: Tensor, num_rows: Tensor, history: int
) -> dict[str, Tensor]:
    """What a recurrent group would hold of some requests once pending rows were folded.

    Args:
        tensors: of the group, all layers, [layers, slots, ...]; unchanged.
        slots: [n] int64.
        num_rows: [n] int64, how many of its pending rows are folded, 0..P.
        history: committed columns of the convolution window.

    Returns:
        By name of the tensor, [layers, n, ...]: the window without pending columns and, where the
        group has one, the recurrent state.
    """
    window = tensors["conv"][:, slots]
    columns = num_rows[:, None] + torch.arange(history, device=slots.device)
    requests = torch.arange(len(slots), device=slots.device)[:, None]
    folded = {"conv": window[:, requests, columns]}
    if "recurrent" in tensors:
        recurrent = tensors["recurrent"][:, slots]
        num_layers = len(recurrent)
        # Layers are as independent of each other as requests are.
        pending = [
            tensors[name][:, slots].flatten(0, 1)
            for name in ("keys", "values", "log_decay", "beta")
        ]
        if pending[0].shape[1]:
            counts = num_rows.repeat(num_layers)
            after = _fold_rows(recurrent.flatten(0, 1), pending, counts)
            recurrent = after.unflatten(0, (num_layers, -1))
        folded["recurrent"] = recurrent
    return folded


def _fold_rows(recurrent: Tensor, pending: Sequence[Tensor], num_rows: Tensor) -> Tensor:
    """States [b, h, dk, dv] after the first `num_rows` [b] of their pending rows.

    Args:
        recurrent: [b, h, dk, dv].
        pending: keys, values, log decays and betas of P rows, [b, P, ...] each.
        num_rows: [b] int64.
    """
    is_folded = torch.arange(pending[0].shape[1], device=num_rows.device) < num_rows[:, None]
    k, v, g, beta = (
        torch.where(is_folded.view(*is_folded.shape, *[1] * (rows.dim() - 2)), rows, 0.0)
        for rows in pending
    )
    k = k.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    return chunk_gated_delta_rule(k[:, :0], k, v, g, beta, recurrent)[1]


def _materialize_conv(conv: Tensor, slots: Tensor, num_kept_rows: Tensor, history: int) -> None:
    window = conv[slots]
    none = torch.zeros_like(num_kept_rows)
    _, stored = roll_window(window, window[:, :0], num_kept_rows, none, history)
    conv[slots] = stored
