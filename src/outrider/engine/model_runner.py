"""Runs the target over the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.batch import ForwardBatch, MarginProbe, ScheduledBatch
from outrider.cache.replay import materialize_delta_net, materialize_ngram
from outrider.engine.prompt_logprobs import PromptLogprobs
from outrider.models.qwen4_exp.cache_specs import TARGET_GROUPS

if TYPE_CHECKING:
    from outrider.cache.cache_manager import CacheManager
    from outrider.cache.layer_states import LayerStates
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.request import Request


@dataclass(frozen=True)
class TargetOutput:
    """What one pass of the target yields.

    Attributes:
        logits: [R, V], for each request that samples one row per draft and one more.
        hidden_states: [T, W], streams of every row, before the final mixer.
    """

    logits: Tensor
    hidden_states: Tensor


class ModelRunner:
    """Builds the rows of a step and runs the target over them.

    Args:
        model: the target.
        cache_manager: of the engine.
        states: of the target's layers.
        known_ids: [A] int64, the ids that a token has, ascending, or None for all.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        cache_manager: CacheManager,
        states: list[LayerStates],
        known_ids: Tensor | None,
    ) -> None:
        self._model = model
        self._prompt_logprobs = PromptLogprobs(model, known_ids)
        self._cache_manager = cache_manager
        self._states = states
        self._group_names = [name for name in TARGET_GROUPS if name in cache_manager.groups]
        config = model.config
        self._context_size = config.ngram_size - 1
        self._delta_net_history = config.linear_conv_kernel_dim - 1
        self._ngram_history = (config.ple_conv_kernel_size - 1) * config.ngram_size
        self._filler = model.config.eos_token_id or 0

    def verify(self, batch: ScheduledBatch, probe: MarginProbe | None = None) -> TargetOutput:
        """One pass over every row: for each request its certain tokens, then its drafts.

        On the way it fills `Request.prompt_logprobs` where a request asks for them.

        Args:
            batch: what runs.
            probe: collects the margins of discrete choices.
        """
        contexts = [
            self._context(request, span.start)
            for request, span in zip(batch.requests, batch.spans, strict=True)
        ]
        positions, slot_mapping, windows = self._cache_manager.plan(
            batch.spans, self._group_names, contexts, snapshots=batch.snapshots
        )
        rows = ForwardBatch(self._token_ids(batch), positions, slot_mapping, windows)
        hidden_states = self._model.model(rows, self._states, probe)
        self._keep_last_streams(batch, hidden_states)
        self._prompt_logprobs.record(batch, hidden_states)
        sampled = self._sampled_rows(batch)
        sampled_states = hidden_states if sampled is None else hidden_states[sampled]
        return TargetOutput(self._model.logits(sampled_states), hidden_states)

    def materialize(self, row: int) -> None:
        """Folds what a request's last pass left pending, so that its states stand for themselves.

        Every pass does so on its way; this is for when none follows.
        """
        manager = self._cache_manager
        num_kept = torch.tensor([manager.num_kept_rows(row)], device=manager.device)
        slots = {
            name: torch.from_numpy(pool.slots(np.array([row]))).to(manager.device)
            for name, pool in manager.state_pools.items()
        }
        for states in self._states:
            if (delta_net := states.delta_net) is not None:
                materialize_delta_net(
                    delta_net, slots[delta_net.group], num_kept, self._delta_net_history
                )
            if (ngram := states.ngram) is not None:
                materialize_ngram(ngram, slots[ngram.group], num_kept, self._ngram_history)
        manager.mark_materialized(row)

    def _context(self, request: Request, start: int) -> list[int]:
        """The token ids before a position, end-of-text before the start of the sequence."""
        known = request.token_ids[max(start - self._context_size, 0) : start]
        return [self._filler] * (self._context_size - len(known)) + known

    def _token_ids(self, batch: ScheduledBatch) -> Tensor:
        """[T] ids: certain ones from the host, drafts from where the proposer left them."""
        token_ids: list[int] = []
        draft_rows: list[int] = []
        owners: list[int] = []
        depths: list[int] = []
        for i, (request, span) in enumerate(zip(batch.requests, batch.spans, strict=True)):
            token_ids += request.token_ids[span.start : span.start + span.num_certain_rows]
            draft_rows += range(len(token_ids), len(token_ids) + span.num_drafts)
            owners += [i] * span.num_drafts
            depths += range(span.num_drafts)
            token_ids += [self._filler] * span.num_drafts
        device = self._cache_manager.device
        ids = torch.tensor(token_ids, device=device)
        if draft_rows:
            assert batch.drafts is not None, "a span with drafts comes with them"
            drafts = batch.drafts.token_ids[
                torch.tensor(owners, device=device), torch.tensor(depths, device=device)
            ]
            # A slot without a draft still runs on some id; its row is rejected like any other.
            ids[torch.tensor(draft_rows, device=device)] = drafts.clamp(min=0)
        return ids

    def _keep_last_streams(self, batch: ScheduledBatch, hidden_states: Tensor) -> None:
        """Keeps the streams of the row before each boundary, [T, W] being those of all rows.

        From a row among the drafts too: whether the boundary is come to is known later.
        """
        prefix = self._cache_manager.prefix
        if prefix is None or not batch.snapshots:
            return
        ends = [0, *accumulate(span.num_rows for span in batch.spans)]
        rows = [ends[one.index] + one.num_rows - 1 for one in batch.snapshots]
        prefix.snapshots.keep_streams(
            [one.slot for one in batch.snapshots],
            hidden_states[torch.tensor(rows, device=hidden_states.device)],
        )

    def _sampled_rows(self, batch: ScheduledBatch) -> Tensor | None:
        """Rows that need logits: the last certain row and the drafts; None if that is all rows."""
        rows: list[int] = []
        offset = 0
        for span, is_sampling in zip(batch.spans, batch.is_sampling, strict=True):
            if is_sampling:
                rows += range(offset + span.num_certain_rows - 1, offset + span.num_rows)
            offset += span.num_rows
        if len(rows) == offset:
            return None
        # The dtype is said, for in the first pieces of a long prompt nothing is sampled.
        return torch.tensor(rows, dtype=torch.int64, device=self._cache_manager.device)
