"""Gated grouped-query attention over the blocks that an indexer selects (QSA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.layers.norm import RMSNorm
from outrider.ops.sparse_attention import (
    attend,
    attend_listed,
    attend_sequence,
    causal_mask,
    index_scores,
    select_blocks,
    selected_positions,
    selection_mask,
)

if TYPE_CHECKING:
    from outrider.batch import ForwardBatch, IndexRebuild, MarginProbe, Window
    from outrider.cache.layer_states import AttentionState
    from outrider.layers.rotary import RotaryEmbedding
    from outrider.models.qwen4_exp.config import Qwen4ExpConfig

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of a row's position, [..., rotary_dim / 2] each."""


@dataclass(frozen=True)
class DepthRows:
    """What a layer keeps of one draft depth over whole sequences.

    Attributes:
        depth: 0-based.
        key: [B, T, Hk, D].
        value: [B, T, Hk, D].
    """

    depth: int
    key: Tensor
    value: Tensor


class IndexShare:
    """One selection for all draft steps of an iteration (index_share_for_mtp_iteration).

    The first draft step records the positions that the last row of each request attends to; once
    frozen, the later steps attend to exactly these, so not to the rows drafted since.

    Attributes:
        positions: [b, M] int64, or None while recording.
        is_listed: [b, M] bool, or None while recording.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        self.is_listed: Tensor | None = None
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(self, requests: Tensor, positions: Tensor, is_listed: Tensor) -> None:
        """Notes the selection of one window.

        Args:
            requests: [b] int64, places in the batch.
            positions: [b, M] int64.
            is_listed: [b, M] bool.
        """
        # What is not listed may lie past the request's own end, where it has no slot.
        self._parts.append((requests, positions.masked_fill(~is_listed, 0), is_listed))

    def freeze(self) -> None:
        """Ends the recording: puts the windows' selections into the order of the batch."""
        width = max(positions.shape[1] for _, positions, _ in self._parts)
        order = torch.cat([requests for requests, _, _ in self._parts]).argsort()
        padded = [
            (
                F.pad(positions, (0, width - positions.shape[1])),
                F.pad(is_listed, (0, width - is_listed.shape[1])),
            )
            for _, positions, is_listed in self._parts
        ]
        self.positions = torch.cat([positions for positions, _ in padded])[order]
        self.is_listed = torch.cat([is_listed for _, is_listed in padded])[order]

    def select(self, requests: Tensor) -> None:
        """Keeps the requests [n] int64 names, as the ones that still draft."""
        assert self.positions is not None, "a share not yet frozen"
        assert self.is_listed is not None, "a share not yet frozen"
        self.positions, self.is_listed = self.positions[requests], self.is_listed[requests]


class Indexer(nn.Module):
    """Small attention whose scores choose the blocks.

    Query heads and the one key head come from one projection, queries first.
    """

    def __init__(self, config: Qwen4ExpConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.indexer_n_heads, config.indexer_head_dim
        self.ratio = config.indexer_compress_ratio
        self.num_selected = config.num_index_blocks
        self.dense_limit = config.index_dense_limit
        self._rotary = [rotary]  # in a list: the table belongs to the model, not to this module
        self.index_qk_proj = nn.Linear(
            config.hidden_size, (self.num_heads + 1) * self.head_dim, bias=False
        )
        self.q_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., C] to unrotated queries [..., heads, dI] and the raw key [..., dI]."""
        queries, key = self.index_qk_proj(hidden).split(
            [self.num_heads * self.head_dim, self.head_dim], dim=-1
        )
        return queries.unflatten(-1, (self.num_heads, -1)), key

    def queries(self, raw: Tensor, angles: Angles) -> Tensor:
        """Normalises and rotates [..., heads, dI] to their rows' positions."""
        cos, sin = angles
        rotated: Tensor = self._rotary[0](
            self.q_layernorm(raw), (cos[..., None, :], sin[..., None, :])
        )
        return rotated

    def pool(self, raw_keys: Tensor, first_positions: Tensor) -> Tensor:
        """Keys of whole blocks: mean of the raw keys, normalised, rotated to the first position.

        Args:
            raw_keys: [..., r, dI].
            first_positions: [...] int64.

        Returns:
            [..., dI].
        """
        mean = raw_keys.mean(-2, dtype=torch.promote_types(raw_keys.dtype, torch.float32))
        key = self.k_layernorm(mean.to(raw_keys.dtype))
        rotated: Tensor = self._rotary[0](key, self._rotary[0].angles(first_positions))
        return rotated

    def rebuild(self, work: IndexRebuild, state: AttentionState) -> None:
        """Forms the pooled keys that new rows have completed or changed."""
        pooled = self.pool(state.raw_index_keys[work.raw_slots], work.blocks * self.ratio)
        state.pooled_index_keys[work.pooled_slots] = pooled


class SparseAttention(nn.Module):
    """One sparse-attention mixer."""

    def __init__(self, config: Qwen4ExpConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self._rotary = [rotary]
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.q_proj = nn.Linear(hidden, 2 * self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps)
        self.k_norm = RMSNorm(self.head_dim, eps)
        self.indexer = Indexer(config, rotary)

    def _project(self, hidden: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[..., C] to query [..., H, D], gate [..., H * D], key and value [..., Hk, D]."""
        cos, sin = angles[0][..., None, :], angles[1][..., None, :]
        query, gate = (
            self.q_proj(hidden).unflatten(-1, (self.num_heads, 2 * self.head_dim)).chunk(2, dim=-1)
        )
        key = self.k_proj(hidden).unflatten(-1, (self.num_kv_heads, -1))
        value = self.v_proj(hidden).unflatten(-1, (self.num_kv_heads, -1))
        query = self._rotary[0](self.q_norm(query), (cos, sin))
        key = self._rotary[0](self.k_norm(key), (cos, sin))
        return query, gate.flatten(-2), key, value

    def _project_sequence(
        self, hidden: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`_project` for training."""
        cos, sin = angles[0][..., None, :], angles[1][..., None, :]
        layers = (self.q_proj, self.k_proj, self.v_proj)
        projected = F.linear(hidden, torch.cat([layer.weight for layer in layers]))
        query, key, value = (
            columns.unflatten(-1, (heads, -1))
            for columns, heads in zip(
                projected.split([layer.out_features for layer in layers], dim=-1),
                (self.num_heads, self.num_kv_heads, self.num_kv_heads),
                strict=True,
            )
        )
        query, gate = query.chunk(2, dim=-1)
        query = self._rotary[0](self.q_norm.forward_sequence(query), (cos, sin))
        key = self._rotary[0](self.k_norm.forward_sequence(key), (cos, sin))
        return query, gate.flatten(-2), key, value

    def _output(self, mixed: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(mixed.flatten(-2) * torch.sigmoid(gate))

    def forward(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        state: AttentionState,
        angles: Angles,
        *,
        share: IndexShare | None = None,
        probe: MarginProbe | None = None,
    ) -> Tensor:
        """Writes the rows' keys, then attends.

        Args:
            hidden: [T, C].
            batch: rows and windows.
            state: the layer's keys and values; modified.
            angles: of the T rows.
            share: the selection to record or to follow, where draft steps share one.
            probe: collects selection margins.

        Returns:
            [T, C].
        """
        query, gate, key, value = self._project(hidden, angles)
        raw_queries, raw_key = self.indexer.project(hidden)
        if batch.is_draft is not None:
            # Rows before a draft read it under a mask, and 0 * NaN is NaN.
            key, value, raw_key = (
                x.masked_fill(batch.is_draft.view(-1, *[1] * (x.dim() - 1)) & ~x.isfinite(), 0.0)
                for x in (key, value, raw_key)
            )
        slots, index_slots = batch.slot_mapping[state.group], batch.slot_mapping[state.index_group]
        state.keys.index_copy_(0, slots, key)
        state.values.index_copy_(0, slots, value)
        state.raw_index_keys.index_copy_(0, index_slots, raw_key)
        mixed, margins = None, None
        for window in batch.windows:
            index_rows = (raw_queries, *angles)
            rows, margin = self._attend_window(
                window, window.gather(query), index_rows, state, share
            )
            mixed = window.scatter(rows, mixed, batch.num_rows)
            if probe is not None:
                margins = window.scatter(margin, margins, batch.num_rows)
        if probe is not None and margins is not None:
            probe.indexer.append(margins)
        assert mixed is not None, "a batch has at least one window"
        return self._output(mixed, gate)

    def _attend_window(
        self,
        window: Window,
        query: Tensor,
        index_rows: tuple[Tensor, Tensor, Tensor],
        state: AttentionState,
        share: IndexShare | None,
    ) -> tuple[Tensor, Tensor]:
        """Attends from [b, L, H, D]; returns the same shape and the selection margin [b, L]."""
        slots = window.paged[state.group].slots
        if share is not None and share.positions is not None:
            assert share.is_listed is not None, "a share is filled as a whole"
            listed = slots.gather(1, share.positions)
            mask = share.is_listed[:, None].expand(-1, query.shape[1], -1)
            mixed = attend(query, state.keys[listed], state.values[listed], mask)
            return mixed, query.new_full(query.shape[:2], torch.inf)
        num_keys = window.max_seq_len
        if num_keys <= self.indexer.dense_limit:
            mask = causal_mask(window.positions, num_keys)
            if share is not None:
                everything = torch.arange(num_keys, device=mask.device).expand_as(mask[:, -1])
                share.record(window.request_index, everything, mask[:, -1])
            mixed = attend(query, state.keys[slots], state.values[slots], mask)
            return mixed, query.new_full(query.shape[:2], torch.inf)
        return self._attend_selected(window, query, index_rows, state, share)

    def _attend_selected(
        self,
        window: Window,
        query: Tensor,
        index_rows: tuple[Tensor, Tensor, Tensor],
        state: AttentionState,
        share: IndexShare | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention past the budget: score, select, then the cheaper of two equal forms."""
        indexer, positions = self.indexer, window.positions
        ratio, num_selected = indexer.ratio, indexer.num_selected
        slots, index_view = window.paged[state.group].slots, window.paged[state.index_group]
        assert index_view.rebuild is not None, "past the budget the runner plans pooled blocks"
        assert index_view.pooled_slots is not None, "past the budget the runner plans pooled blocks"
        indexer.rebuild(index_view.rebuild, state)
        raw_queries, cos, sin = (window.gather(rows) for rows in index_rows)
        scores = index_scores(
            indexer.queries(raw_queries, (cos, sin)),
            state.pooled_index_keys[index_view.pooled_slots],
        )
        is_selected, margin = select_blocks(scores, positions, ratio, num_selected)
        if share is not None:
            last, is_listed = selected_positions(
                is_selected[:, -1:], positions[:, -1:], ratio, num_selected
            )
            share.record(window.request_index, last[:, 0], is_listed[:, 0])
        num_listed = (num_selected + 1) * ratio - 1
        if query.shape[1] * num_listed <= window.max_seq_len:
            listed, is_listed = selected_positions(is_selected, positions, ratio, num_selected)
            chosen = slots.gather(1, listed.flatten(1)).view_as(listed)
            mixed = attend_listed(query, state.keys[chosen], state.values[chosen], is_listed)
        else:
            mask = selection_mask(is_selected, positions, ratio, window.max_seq_len)
            mixed = attend(query, state.keys[slots], state.values[slots], mask)
        return mixed, margin

    def forward_sequence(
        self,
        hidden: Tensor,
        angles: Angles,
        *,
        past: list[DepthRows] | None = None,
        depth: int = 0,
        dense: bool = False,
        want_index_loss: bool = False,
        row_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Whole sequences from an empty cache, differentiable.

        Args:
            hidden: [B, T, C].
            angles: of positions 0..T-1, [T, rotary_dim / 2] each.
            past: what the layer kept of shallower draft depths; this call's rows are appended.
                Row p attends to its first depth's rows up to p - j, j depths back, and then to
                one row of each deeper depth, as a draft step does at inference.
            depth: of this call.
            dense: attend to everything visible, whatever the indexer says.
            want_index_loss: also return the distillation loss of the indexer.
            row_mask: [B, T] bool, the rows that count in that loss; None is all of them.

        Returns:
            [B, T, C] and the loss (scalar), or None where it was not asked for.
        """
        query, gate, key, value = self._project_sequence(hidden, angles)
        past = [] if past is None else past
        past.append(DepthRows(depth, key, value))
        length = hidden.shape[1]
        is_sparse = not dense and length > self.indexer.dense_limit
        scores = None
        if is_sparse or want_index_loss:
            scores = self._sequence_scores(hidden.detach(), angles)
        mass = None
        if not is_sparse or want_index_loss:
            mixed, mass = attend_sequence(
                query,
                [rows.key for rows in past],
                [rows.value for rows in past],
                [rows.depth for rows in past],
                self.indexer.ratio if want_index_loss else None,
            )
        if is_sparse and scores is not None:
            mixed = self._attend_sparse(query, scores.detach(), past)
        loss = None
        if mass is not None and scores is not None:
            loss = self._index_loss(mass, scores, row_mask)
        return self._output(mixed, gate), loss

    def _attend_sparse(self, query: Tensor, scores: Tensor, past: list[DepthRows]) -> Tensor:
        """Attention of [B, T, H, D] over what the index scores [B, T, T // r] select."""
        batch, length = query.shape[:2]
        positions = torch.arange(length, device=query.device).expand(batch, length)
        ratio = self.indexer.ratio
        is_selected, _ = select_blocks(scores, positions, ratio, self.indexer.num_selected)
        mask = selection_mask(is_selected, positions, ratio, length)
        if past[-1].depth:
            mask = _unrolled_mask(mask, [rows.depth for rows in past])
        key = torch.cat([rows.key for rows in past], dim=1)
        value = torch.cat([rows.value for rows in past], dim=1)
        return attend(query, key, value, mask)

    def _sequence_scores(self, hidden: Tensor, angles: Angles) -> Tensor:
        """Index scores [B, T, T // r] of whole sequences [B, T, C]."""
        indexer = self.indexer
        raw_queries, raw_keys = indexer.project(hidden)
        num_blocks = hidden.shape[1] // indexer.ratio
        blocks = raw_keys[:, : num_blocks * indexer.ratio].unflatten(1, (num_blocks, indexer.ratio))
        first = torch.arange(num_blocks, device=hidden.device) * indexer.ratio
        return index_scores(indexer.queries(raw_queries, angles), indexer.pool(blocks, first))

    def _index_loss(self, mass: Tensor, scores: Tensor, row_mask: Tensor | None) -> Tensor:
        """KL from the attention mass of each complete block to the softmax of the index scores.

        Dense distillation: no gradient reaches the indexer through a discrete selection, so it is
        taught what dense attention looks at.

        Args:
            mass: [B, T, M], mean over heads of the probability on each block, no gradient.
            scores: [B, T, M].
            row_mask: [B, T] bool or None.
        """
        length, num_blocks = scores.shape[1:]
        complete = (torch.arange(length, device=scores.device) + 1) // self.indexer.ratio
        is_visible = torch.arange(num_blocks, device=scores.device) < complete[:, None]
        mass = mass.masked_fill(~is_visible, 0.0)
        target = mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)
        has_choice = complete >= 2
        log_probs = scores.masked_fill(~is_visible, -torch.inf)[:, has_choice].log_softmax(-1)
        log_probs = log_probs.masked_fill(~is_visible[has_choice], 0.0)
        target = target[:, has_choice]
        by_row = (target * (target.clamp(min=1e-9).log() - log_probs)).sum(-1)
        if row_mask is None:
            return by_row.mean()
        is_counted = row_mask[:, has_choice]
        return by_row.masked_fill(~is_counted, 0.0).sum() / is_counted.sum().clamp(min=1)


def _unrolled_mask(mask: Tensor, depths: list[int]) -> Tensor:
    """Mask of a draft depth over the rows that its layer kept of all its depths, one after another.

    Rows p < d of a depth d have no predecessor. No row but themselves attends to them: they were
    made from what `torch.roll` brings in, the end of the sequence.

    Args:
        mask: [b, T, T], what a row of the first depth attends to.
        depths: of the rows kept, ascending; the last one is the depth that attends, 1 or more.

    Returns:
        [b, T, len(depths) * T]: of the first depth the rows up to p - j, j depths back, and of
        each other depth d the row p - (depths[-1] - d).
    """
    length, first, last = mask.shape[-1], depths[0], depths[-1]
    places = torch.arange(length, device=mask.device)
    offset = places[:, None] - places[None, :]
    seen = mask & (offset >= last - first) & (places >= first)
    if first == last:
        seen = seen | (offset == 0)
    return torch.cat([seen, *((offset == last - d).expand_as(mask) for d in depths[1:])], dim=-1)
