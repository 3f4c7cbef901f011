"""Drafts with the checkpoint's own multi-token-prediction head.

After a step in which a request's kept rows are p0..p and its newest token is x_{p+1}, the head
first runs the kept rows, (X_i, x_{i+1}) for i in p0..p, which overwrites whatever earlier drafts
left in its cache; row p yields the first draft d_1. Each further draft feeds the head its own
streams and its last draft, one position on:

    draft step 0    rows p0..p     streams X_i (target)    token x_{i+1}    -> d_1 for position p+2
    draft step 1    row p+1        streams Y_p             token d_1        -> d_2 for position p+3
    draft step 2    row p+2        streams Y_{p+1}         token d_2        -> d_3 for position p+4
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.batch import (
    PLACEHOLDER_TOKEN_ID,
    DraftTokens,
    ForwardBatch,
    RowSpan,
    SampledTokens,
    ScheduledBatch,
)
from outrider.errors import ConfigError
from outrider.models.qwen4_exp.cache_specs import MTP_GROUPS
from outrider.models.qwen4_exp.sparse_attention import IndexShare
from outrider.spec_decode.draft_length import draft_length, head_runs
from outrider.spec_decode.draft_sampler import DraftSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.cache.cache_manager import CacheManager
    from outrider.cache.layer_states import LayerStates
    from outrider.config import DraftSampleMethod
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.request import Request
    from outrider.spec_decode.request_sampling import SamplingDefaults


class MTPProposer:
    """The Proposer of `method: mtp`.

    Args:
        model: with its head.
        cache_manager: of the engine; the head has cache groups of its own in it.
        states: of the head's layers.
        defaults: rule and vocabulary.
        num_speculative_tokens: K.
        draft_sample_method: "probabilistic" or "greedy".
        shares_index: one index selection for all draft steps of an iteration.
        max_model_len: positions from here on get no draft; None is no such limit.

    Raises:
        ConfigError: the head has another number of layers than 1.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        cache_manager: CacheManager,
        states: list[LayerStates],
        defaults: SamplingDefaults,
        *,
        num_speculative_tokens: int,
        draft_sample_method: DraftSampleMethod,
        shares_index: bool,
        max_model_len: int | None = None,
    ) -> None:
        if model.mtp is None:
            raise ConfigError(
                "the model was loaded without its MTP head: give speculative_config when loading it"
            )
        if len(model.mtp.layers) != 1:
            raise ConfigError(
                f"mtp_num_hidden_layers must be 1 to draft with, got {len(model.mtp.layers)}"
            )
        self._model = model
        self._mtp = model.mtp
        self._cache_manager = cache_manager
        self._states = states
        self._num_speculative_tokens = num_speculative_tokens
        self._shares_index = shares_index
        self._max_model_len = max_model_len
        self._sampler = DraftSampler(defaults, draft_sample_method)

    def propose(
        self, batch: ScheduledBatch, hidden_states: Tensor, result: SampledTokens
    ) -> DraftTokens | None:
        """Drafts for every request of the batch that has room for drafts."""
        lengths = self._draft_lengths(batch, result)
        members = [i for i, length in enumerate(lengths) if length]
        left = self._left_to_others(batch, result, lengths)
        if left:
            self._catch_up(batch, hidden_states, result, left, None)
        if not members:
            return None
        share = IndexShare() if self._shares_index else None
        streams = self._catch_up(batch, hidden_states, result, members, share)
        drafting = [i for i, member in enumerate(members) if batch.is_sampling[member]]
        if not drafting:
            return None
        if len(drafting) < len(members):
            keep = torch.tensor(drafting, device=streams.device)
            streams = streams[keep]
            if share is not None:
                share.select(keep)
        members = [members[i] for i in drafting]
        return self._draft(batch, result, members, [lengths[i] for i in members], streams, share)

    def _draft_lengths(self, batch: ScheduledBatch, result: SampledTokens) -> list[int]:
        """K of each request's next window, or of the first one after its prompt.

        0 where none will come: room for drafts only shrinks, so the head need not follow such a
        request any further.
        """
        lengths = []
        for i, request in enumerate(batch.requests):
            length = draft_length(
                request,
                max(len(result.output_token_ids[i]), 1),
                self._num_speculative_tokens,
                self._max_model_len,
            )
            lengths.append(0 if _has_ended(request, result, i) else length)
        return lengths

    def _left_to_others(
        self, batch: ScheduledBatch, result: SampledTokens, lengths: Sequence[int]
    ) -> list[int]:
        """Requests that draft no more, whose rows the head runs for those that come after them.

        In a pass of its own, so that what the others are drafted does not depend on them; and only
        as long as the request can come to fill a block, for nothing less is shared.
        """
        if self._cache_manager.prefix is None:
            return []
        members, size = [], self._cache_manager.block_size
        for i, (request, span) in enumerate(zip(batch.requests, batch.spans, strict=True)):
            if lengths[i] or result.is_broken[i]:
                continue
            end = request.num_prompt_tokens + request.max_output_tokens - 1
            if _has_ended(request, result, i):
                end = span.start + span.num_certain_rows + result.num_accepted_tokens[i]
            num_new, k = len(result.output_token_ids[i]), self._num_speculative_tokens
            is_run = head_runs(request, num_new, k, self._max_model_len)
            if is_run and span.start < end // size * size:
                members.append(i)
        return members

    def _catch_up(
        self,
        batch: ScheduledBatch,
        hidden_states: Tensor,
        result: SampledTokens,
        members: Sequence[int],
        share: IndexShare | None,
    ) -> Tensor:
        """Draft step 0: runs the kept rows; returns the streams of each member's last, [b, W].

        A request that began behind a prefix of others has one row more before its first: the
        head's row at the end of the prefix, which takes the request's own token after it.
        """
        spans: list[RowSpan] = []
        rows: list[int] = []
        next_ids: list[int] = []
        prefixes: list[Tensor] = []
        offset, offsets = 0, []
        for span in batch.spans:
            offsets.append(offset)
            offset += span.num_rows
        for i in members:
            span, request = batch.spans[i], batch.requests[i]
            start, num_kept = span.start, span.num_certain_rows + result.num_accepted_tokens[i]
            kept = range(offsets[i], offsets[i] + num_kept)
            if (last_streams := self._last_streams(span.row)) is not None:
                rows.append(offset + len(prefixes))
                prefixes.append(last_streams[None])
                start, num_kept = start - 1, num_kept + 1
            rows += kept
            known = request.token_ids[start + 1 : start + 1 + num_kept]
            next_ids += known
            next_ids += result.output_token_ids[i][: num_kept - len(known)]
            spans.append(RowSpan(span.row, start, num_kept, 0))
        assert len(next_ids) == len(rows), "every kept row has a token after it"
        device = hidden_states.device
        hidden_states = torch.cat([hidden_states, *prefixes]) if prefixes else hidden_states
        if len(rows) != hidden_states.shape[0] or prefixes:
            hidden_states = hidden_states[torch.tensor(rows, device=device)]
        streams = self._forward(
            hidden_states,
            torch.tensor(next_ids, device=device),
            spans,
            spec_step_idx=0,
            share=share,
        )
        if share is not None:
            share.freeze()
        counts = torch.tensor([span.num_rows for span in spans], device=device)
        return streams[counts.cumsum(0) - 1]

    def _last_streams(self, row: int) -> Tensor | None:
        """[W], the target's streams before a request's first row, where others have run them."""
        prefix = self._cache_manager.prefix
        return None if prefix is None else prefix.take_last_streams(row)

    def _draft(
        self,
        batch: ScheduledBatch,
        result: SampledTokens,
        members: Sequence[int],
        lengths: Sequence[int],
        streams: Tensor,
        share: IndexShare | None,
    ) -> DraftTokens:
        """Samples the first draft from [b, W] streams, then feeds the head its own output."""
        requests = [batch.requests[i] for i in members]
        outputs = [result.output_token_ids[i] for i in members]
        starts = [
            len(request.token_ids) + len(output)
            for request, output in zip(requests, outputs, strict=True)
        ]
        num_steps, device = max(lengths), streams.device
        sampling = self._sampler.start(requests, outputs)
        active = list(range(len(members)))
        token_ids = torch.full(
            (len(batch.requests), num_steps), PLACEHOLDER_TOKEN_ID, device=device
        )
        drawn, probs = token_ids[:, 0], None
        is_unsound = None
        if self._cache_manager.prefix is not None:
            is_unsound = torch.zeros(len(batch.requests), dtype=torch.bool, device=device)
            is_unsound[torch.tensor(members, device=device)] = ~streams.isfinite().all(-1)
        for step in range(num_steps):
            still = [i for i in active if lengths[i] > step]
            if step and len(still) < len(active):
                keep = torch.tensor([active.index(i) for i in still], device=device)
                streams, drawn = streams[keep], drawn[keep]
                if share is not None:
                    share.select(keep)
            active = still
            if step:
                spans = [
                    RowSpan(batch.spans[members[i]].row, starts[i] - 2 + step, 1, 0) for i in active
                ]
                streams = self._forward(streams, drawn, spans, spec_step_idx=step, share=share)
            drawn, law = self._sampler.draw(self._model.mtp_logits(streams), sampling, active, step)
            places = torch.tensor([members[i] for i in active], device=device)
            token_ids[places, step] = drawn
            if law is not None:
                if probs is None:
                    probs = law.new_zeros(len(batch.requests), num_steps, law.shape[-1])
                probs[places, step] = law
        num_drafts = [0] * len(batch.requests)
        for i, length in zip(members, lengths, strict=True):
            num_drafts[i] = length
        return DraftTokens(token_ids, probs, num_drafts, is_unsound)

    def _forward(
        self,
        streams: Tensor,
        token_ids: Tensor,
        spans: Sequence[RowSpan],
        *,
        spec_step_idx: int,
        share: IndexShare | None,
    ) -> Tensor:
        """One pass of the head over [T, W] streams and [T] tokens; returns its streams [T, W]."""
        positions, slot_mapping, windows = self._cache_manager.plan(
            spans,
            MTP_GROUPS,
            [()] * len(spans),
            reads_index=share is None or share.positions is None,
        )
        rows = ForwardBatch(token_ids, positions, slot_mapping, windows)
        embedded = self._model.model.embed_tokens(token_ids)
        return self._mtp(streams, embedded, rows, self._states, spec_step_idx, share)


def _has_ended(request: Request, result: SampledTokens, index: int) -> bool:
    """Whether the request ends with what place `index` of the batch has emitted."""
    new_ids = result.output_token_ids[index]
    return result.is_broken[index] or not request.stop_token_ids.isdisjoint(new_ids)
