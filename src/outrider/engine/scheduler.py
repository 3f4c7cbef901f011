"""Decides who runs, and takes up what came out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from outrider.batch import DraftTokens, RowSpan, SampledTokens, ScheduledBatch
from outrider.outputs import StepOutput
from outrider.spec_decode.metrics import SpecDecodeMetrics

if TYPE_CHECKING:
    from outrider.cache.cache_manager import CacheManager
    from outrider.request import Request


class Scheduler:
    """First come, first served; running requests go before waiting ones.

    A request is admitted when its whole length finds room in the caches and a window of K drafts
    finds room in every step, so that none that runs has ever to give way. Drafts left out for want
    of room would make the text that a seed gives depend on who else runs.

    Args:
        cache_manager: of the engine.
        max_num_batched_tokens: rows of a step; a longer prompt runs in pieces, and of a longer
            window the drafts that find room.
        num_speculative_tokens: K.
    """

    def __init__(
        self,
        cache_manager: CacheManager,
        *,
        max_num_batched_tokens: int,
        num_speculative_tokens: int,
    ) -> None:
        self._cache_manager = cache_manager
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_running = max(max_num_batched_tokens // (num_speculative_tokens + 1), 1)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._drafts: DraftTokens | None = None
        self.metrics = SpecDecodeMetrics(num_speculative_tokens)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def flush_text(self, request_id: str) -> str:
        """What was held back of a request's text; nothing of an unknown one."""
        request = self._requests.get(request_id)
        return "" if request is None else request.stop_checker.flush()

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Drops a request between two steps; an unknown id is no error."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.row is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._cache_manager.free(request.row)

    def schedule(self) -> ScheduledBatch:
        """Chooses the rows of the next step."""
        self._admit()
        budget = self._max_num_batched_tokens
        requests: list[Request] = []
        spans: list[RowSpan] = []
        is_sampling: list[bool] = []
        for request in self._running:
            if budget == 0:
                break
            remaining = len(request.token_ids) - request.num_computed_tokens
            num_certain = min(remaining, budget)
            # Who drafts is past its prompt, and so is everybody before it: only where a step is
            # shorter than a single window do drafts find no room.
            num_drafts = min(request.num_drafts, budget - num_certain)
            num_rows = num_certain + num_drafts
            assert request.row is not None, "a running request has a row"
            requests.append(request)
            spans.append(RowSpan(request.row, request.num_computed_tokens, num_rows, num_drafts))
            is_sampling.append(num_certain == remaining)
            budget -= num_rows
        return ScheduledBatch(requests, spans, is_sampling, self._select_drafts(requests, spans))

    def update(
        self, batch: ScheduledBatch, result: SampledTokens, drafts: DraftTokens | None
    ) -> list[StepOutput]:
        """Takes up the tokens of a step: cuts them at a stop or the cap, counts, frees.

        Returns:
            One output for each request that emitted something or ended.
        """
        outputs = []
        self._drafts = drafts
        for request in self._running:
            request.num_drafts = 0
        for i, request in enumerate(batch.requests):
            span = batch.spans[i]
            request.num_computed_tokens += span.num_certain_rows + result.num_accepted_tokens[i]
            if not batch.is_sampling[i]:
                continue
            output = _emit(request, result, i)
            outputs.append(output)
            self.metrics.observe(
                output.num_draft_tokens,
                output.num_accepted_tokens,
                len(output.new_token_ids),
                output.num_fallbacks,
            )
            if output.finish_reason is not None:
                assert request.row is not None, "a running request has a row"
                self._cache_manager.free(request.row)
                del self._requests[request.request_id]
            elif drafts is not None:
                # The request has blocks for what it may emit, and no row may run past them.
                room = request.max_output_tokens - request.num_output_tokens
                request.draft_index, request.num_drafts = i, min(drafts.num_drafts[i], room)
        self._running = [r for r in self._running if r.request_id in self._requests]
        return outputs

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_running:
            request = self._waiting[0]
            num_tokens = request.num_prompt_tokens + request.max_output_tokens
            if not self._cache_manager.can_allocate(num_tokens):
                return
            request.row = self._cache_manager.allocate(num_tokens)
            self._running.append(self._waiting.popleft())

    def _select_drafts(self, requests: list[Request], spans: list[RowSpan]) -> DraftTokens | None:
        """The waiting drafts, brought into the order of the batch."""
        drafts = self._drafts
        num_drafts = [span.num_drafts for span in spans]
        if drafts is None or not any(num_drafts):
            return None
        order = [request.draft_index if request.num_drafts else 0 for request in requests]
        if order == list(range(len(drafts.num_drafts))):
            return DraftTokens(drafts.token_ids, drafts.probs, num_drafts)
        return drafts.select(torch.tensor(order, device=drafts.token_ids.device), num_drafts)


def _emit(request: Request, result: SampledTokens, i: int) -> StepOutput:
    """What request i of a batch emits: its new tokens up to the first that ends the output."""
    run = request.stop_checker.extend(result.output_token_ids[i])
    is_first = not request.num_output_tokens
    request.token_ids += run.token_ids
    text, reason = run.text, run.finish_reason
    if result.is_broken[i]:
        text, reason = request.stop_checker.flush(), "error"
    num_new, logprobs = len(run.token_ids), result.logprobs[i]
    prompt_logprobs = request.prompt_logprobs if is_first else None
    return StepOutput(
        request_id=request.request_id,
        new_token_ids=run.token_ids,
        new_text=text,
        num_draft_tokens=result.num_draft_tokens[i],
        num_accepted_tokens=min(result.num_accepted_tokens[i], num_new),
        num_fallbacks=result.num_fallbacks[i],
        finish_reason=reason,
        stop_reason=run.stop_reason,
        logprobs=None if logprobs is None else list(logprobs[:num_new]),
        prompt_logprobs=None if prompt_logprobs is None else [None, *prompt_logprobs],
    )
