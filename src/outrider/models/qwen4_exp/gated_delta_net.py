"""Gated delta net: linear attention with a matrix-valued state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.layers.norm import L2_EPS, RMSNorm, l2_normalise
from outrider.ops.causal_conv import (
    causal_conv,
    causal_conv_silu,
    roll_window,
    windows_after,
)
from outrider.ops.gated_delta_rule import (
    StateProbe,
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
    sequence_gated_delta_rule,
)
from outrider.ops.normalise import gated_rms_rows, unit_rows

if TYPE_CHECKING:
    from outrider.batch import ForwardBatch, Window
    from outrider.cache.layer_states import DeltaNetState
    from outrider.models.qwen4_exp.config import Qwen4ExpConfig


class Conv1dWeight(nn.Module):
    """Holds a depthwise kernel under the checkpoint's name and shape, [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class GatedDeltaNet(nn.Module):
    """One delta-net mixer."""

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        self.num_key_heads = config.linear_num_key_heads
        self.num_value_heads = config.linear_num_value_heads
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        self.key_dim = config.linear_key_dim
        self.history = config.linear_conv_kernel_dim - 1
        self.gate_activation = torch.sigmoid if config.output_gate == "sigmoid" else F.silu
        hidden = config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden, config.linear_conv_dim, bias=False)
        self.in_proj_z = nn.Linear(hidden, config.linear_value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.num_value_heads, bias=False)
        self.conv1d = Conv1dWeight(config.linear_conv_dim, config.linear_conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.empty(self.num_value_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_value_heads))
        self.norm = RMSNorm(self.value_head_dim, config.rms_norm_eps, is_plain=True)
        self.out_proj = nn.Linear(config.linear_value_dim, hidden, bias=False)

    def _decay_and_beta(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., C] to log decay and write strength, [..., h] each."""
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(hidden) + self.dt_bias)
        return decay, torch.sigmoid(self.in_proj_b(hidden))

    def _heads(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolves [b, history + L, channels]; returns q, k [b, L, hk, dk] and v [b, L, h, dv]."""
        mixed = F.silu(causal_conv(columns, self.conv1d.weight[:, 0]))
        q, k, v = mixed.split([self.key_dim, self.key_dim, mixed.shape[-1] - 2 * self.key_dim], -1)
        q = l2_normalise(q.unflatten(-1, (-1, self.key_head_dim))) * self.key_head_dim**-0.5
        k = l2_normalise(k.unflatten(-1, (-1, self.key_head_dim)))
        return q, k, v.unflatten(-1, (-1, self.value_head_dim))

    def _per_value_head(self, x: Tensor) -> Tensor:
        """[b, L, hk, dk] to [b, L, h, dk]: value head j reads key head j // (h / hk)."""
        repeats = self.num_value_heads // self.num_key_heads
        return x.repeat_interleave(repeats, dim=2) if repeats > 1 else x

    def _output(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        """Normalises, gates and projects [..., h, dv] to [..., C]."""
        z = self.in_proj_z(hidden).unflatten(-1, (-1, self.value_head_dim))
        gated = self.norm(mixed) * self.gate_activation(z)
        return self.out_proj(gated.flatten(-2))

    def forward(self, hidden: Tensor, batch: ForwardBatch, state: DeltaNetState) -> Tensor:
        """Runs the rows of a batch, folding into the state what is certain.

        Args:
            hidden: [T, C].
            batch: rows and windows.
            state: the layer's recurrent state; modified.

        Returns:
            [T, C].
        """
        columns = self.in_proj_qkv(hidden)
        decay, beta = self._decay_and_beta(hidden)
        mixed = None
        for window in batch.windows:
            rows = self._mix_window(
                window, window.gather(columns), window.gather(decay), window.gather(beta), state
            )
            mixed = window.scatter(rows, mixed, batch.num_rows)
        assert mixed is not None, "a batch has at least one window"
        return self._output(mixed, hidden)

    def _mix_window(
        self, window: Window, columns: Tensor, decay: Tensor, beta: Tensor, state: DeltaNetState
    ) -> Tensor:
        """Folds kept and certain rows of [b, L, ...], returns what each row reads [b, L, h, dv]."""
        slots = window.state_slots[state.group]
        columns, stored = roll_window(
            state.conv[slots], columns, window.num_kept_rows, window.num_certain_rows, self.history
        )
        state.conv[slots] = stored
        q, k, v = self._heads(columns)
        recurrent = state.recurrent[slots]
        num_pending = state.keys.shape[1] if window.has_pending else 0
        if q.shape[1] == 1 and not num_pending:
            q, k = self._per_value_head(q), self._per_value_head(k)
            mixed, recurrent = recurrent_gated_delta_rule(q, k, v, decay, beta, recurrent)
            state.recurrent[slots] = recurrent
            return mixed
        probe = _start_snapshots(window, columns, state, num_pending)
        length = q.shape[1]
        is_certain = _prefix(window.num_certain_rows, length)
        is_used = window.is_row
        if window.has_drafts:
            # Rows before a draft read it under a decay of 0, and 0 * NaN is NaN. Those after it
            # are as broken, by the convolution.
            is_finite = columns[:, self.history :].isfinite().all(-1).long().cumprod(-1).bool()
            is_used = is_used & (is_certain | is_finite)
        is_folded = is_certain
        new = (k, v, decay, beta)
        if num_pending:
            is_kept = _prefix(window.num_kept_rows, num_pending)
            is_used = torch.cat([is_kept, is_used], dim=1)
            # Pending rows that were not kept are the identity, so they may count as folded.
            is_folded = torch.cat([torch.ones_like(is_kept), is_certain], dim=1)
            old = (state.keys, state.values, state.log_decay, state.beta)
            all_rows = [torch.cat([o[slots], n], dim=1) for o, n in zip(old, new, strict=True)]
        else:
            all_rows = list(new)
        k, v, decay, beta = (_select(is_used, x) for x in all_rows)
        has_drafts = state.keys.shape[1] > 0 and length <= state.keys.shape[1] + 1
        mixed, recurrent = chunk_gated_delta_rule(
            self._per_value_head(q),
            self._per_value_head(k),
            v,
            decay,
            beta,
            recurrent,
            is_folded if has_drafts else None,
            probe,
        )
        state.recurrent[slots] = recurrent
        if probe is not None and window.snapshots is not None and state.kept_recurrent is not None:
            state.kept_recurrent[window.snapshots.slots] = torch.stack(probe.states)
        if has_drafts:
            _store_pending(window, new, slots, state)
        return mixed

    def forward_sequence(self, hidden: Tensor) -> Tensor:
        """Whole sequences [B, T, C] from the zero state, differentiable."""
        layers = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        # One product for all four: the input is read once, and its gradient is summed inside.
        projected = F.linear(hidden, torch.cat([layer.weight for layer in layers]))
        columns, z, b, a = projected.split([layer.out_features for layer in layers], dim=-1)
        mixed = causal_conv_silu(columns, self.conv1d.weight[:, 0])
        keys, v = mixed.split([2 * self.key_dim, mixed.shape[-1] - 2 * self.key_dim], dim=-1)
        q, k = unit_rows(keys.unflatten(-1, (-1, self.key_head_dim)), L2_EPS).chunk(2, dim=2)
        outputs = sequence_gated_delta_rule(
            q * self.key_head_dim**-0.5,
            k,
            v.unflatten(-1, (-1, self.value_head_dim)),
            -self.A_log.exp() * F.softplus(a + self.dt_bias),
            torch.sigmoid(b),
        )
        gated = gated_rms_rows(
            outputs,
            self.norm.weight,
            z.unflatten(-1, (-1, self.value_head_dim)),
            self.norm.eps,
            is_silu=self.gate_activation is F.silu,
        )
        return self.out_proj(gated.flatten(-2))


def _prefix(counts: Tensor, length: int) -> Tensor:
    """[b] counts to the [b, length] mask of the first so many places."""
    return torch.arange(length, device=counts.device) < counts[:, None]


def _select(is_used: Tensor, x: Tensor) -> Tensor:
    """Zero where not used: a select, since unused rows may hold NaN."""
    return torch.where(is_used.view(*is_used.shape, *[1] * (x.dim() - 2)), x, 0.0)


def _start_snapshots(
    window: Window, columns: Tensor, state: DeltaNetState, num_pending: int
) -> StateProbe | None:
    """Keeps the convolution windows at block boundaries; returns what collects the states there."""
    wanted = window.snapshots
    if wanted is None or state.kept_conv is None:
        return None
    state.kept_conv[wanted.slots] = windows_after(
        columns, wanted.requests, wanted.num_rows, state.kept_conv.shape[1]
    )
    return StateProbe([(request, num_pending + rows) for request, rows in wanted.stops])


def _store_pending(
    window: Window, rows: tuple[Tensor, ...], slots: Tensor, state: DeltaNetState
) -> None:
    """Keeps the draft rows, which follow the certain ones, as the pending rows of the state."""
    pending = state.keys.shape[1]
    length = rows[0].shape[1]
    steps = torch.arange(pending, device=slots.device)
    source = (window.num_certain_rows[:, None] + steps).clamp_(max=length - 1)
    requests = torch.arange(slots.shape[0], device=slots.device)[:, None]
    stores = (state.keys, state.values, state.log_decay, state.beta)
    for store, row in zip(stores, rows, strict=True):
        store[slots] = row[requests, source]
