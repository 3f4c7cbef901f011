"""Decides who runs, and takes up what came out."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outrider.batch import DraftTokens, RowSpan, SampledTokens, ScheduledBatch
from outrider.cache.prefix_cache import NO_HIT
from outrider.engine.prefix_sharing import PrefixSharing
from outrider.outputs import StepOutput
from outrider.spec_decode.draft_length import most_drafts
from outrider.spec_decode.metrics import SpecDecodeMetrics
from outrider.structured_outputs import GRAMMAR_STUCK

if TYPE_CHECKING:
    from outrider.cache.cache_manager import CacheManager
    from outrider.request import Request


class Scheduler:
    """First come, first served; running requests go before waiting ones.

    A request holds blocks for the tokens that it has and takes more as it grows. Where there are
    none left, the request that came last gives way: it loses its caches, goes back to the front of
    the queue, and later runs prompt and output again as one prompt. So the one that came first
    always gets on, and requests end in spite of any shortage, as long as each would fit alone.

    What gives way does so before a step, for the number of its drafts and not for their values:
    they were drawn and nobody has looked at them, so that dropping them leaves the law of the text
    alone. No draft is dropped for want of rows, for that would make the text which a seed gives
    depend on who else runs: rows are set apart for every window before prompts get theirs, and no
    more requests run than have room for windows of K drafts.

    Args:
        cache_manager: of the engine.
        max_num_batched_tokens: rows of a step; a longer prompt runs in pieces, and of a longer
            window the drafts that find room.
        num_speculative_tokens: K.
        drafter_max_model_len: positions from here on get no draft; None is no limit.
        long_prefill_token_threshold: rows of one prompt in a step; 0 is as many as find room.

    Attributes:
        has_prompt_rows: the last step ran more than the newest token of some request: a piece of
            a prompt, or again what a request had before it gave way.
    """

    def __init__(
        self,
        cache_manager: CacheManager,
        *,
        max_num_batched_tokens: int,
        num_speculative_tokens: int,
        drafter_max_model_len: int | None = None,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self._cache_manager = cache_manager
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_speculative_tokens = num_speculative_tokens
        self._max_num_prompt_rows = long_prefill_token_threshold or max_num_batched_tokens
        self._max_num_running = max(max_num_batched_tokens // (num_speculative_tokens + 1), 1)
        # Both in the order of arrival, and all that run came before all that wait.
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        # Those that are neither finished nor aborted.
        self._requests: dict[str, Request] = {}
        self._drafts: DraftTokens | None = None
        self._is_in_step = False
        self.metrics = SpecDecodeMetrics(num_speculative_tokens)
        self.prefix: PrefixSharing | None = None
        if cache_manager.prefix is not None:
            self.prefix = PrefixSharing(
                cache_manager, num_speculative_tokens, drafter_max_model_len
            )
        self.num_preemptions = 0
        self.has_prompt_rows = False

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that have a place in the caches."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def flush_text(self, request_id: str) -> str:
        """What was held back of a request's text; nothing of an unknown one."""
        request = self._requests.get(request_id)
        return "" if request is None else request.stop_checker.flush()

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        assert self._cache_manager.fits(_num_positions(request)), "a request that can never run"
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Drops a request, at any moment; an unknown id is no error.

        A step that is under way goes on over its rows, for the sake of the others, and its caches
        are free after it. Nothing more is emitted for it.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.row is None:
            self._waiting.remove(request)
        elif not self._is_in_step:
            self._drop_ended()

    def schedule(self) -> ScheduledBatch:
        """Chooses the rows of the next step, and makes room for them; `update` ends the step."""
        assert not self._is_in_step, "the step before has not ended"
        self._is_in_step = True
        num_preemptions = self.num_preemptions
        rows = _RowBudget(self._max_num_batched_tokens, self._running)
        chosen = self._choose_running(rows)
        if num_preemptions == self.num_preemptions:
            chosen += self._admit(rows)
        requests = [request for request, _ in chosen]
        spans = [span for _, span in chosen]
        self.has_prompt_rows = any(span.num_certain_rows > 1 for span in spans)
        is_sampling = [
            span.start + span.num_certain_rows == len(request.token_ids) for request, span in chosen
        ]
        drafts = self._select_drafts(requests, spans)
        self._drafts = None
        batch = ScheduledBatch(requests, spans, is_sampling, drafts)
        return batch if self.prefix is None else self.prefix.start(batch)

    def update(
        self, batch: ScheduledBatch, result: SampledTokens, drafts: DraftTokens | None
    ) -> list[StepOutput]:
        """Takes up the tokens of a step: cuts them at a stop or the cap, counts, frees.

        Returns:
            One output for each request that emitted something or ended.
        """
        outputs = []
        # Of those that were aborted meanwhile nothing is taken up.
        is_left = [self._is_unfinished(request) for request in batch.requests]
        for request in self._running:
            request.num_drafts = 0
        for i, request in enumerate(batch.requests):
            span = batch.spans[i]
            request.num_computed_tokens += span.num_certain_rows + result.num_accepted_tokens[i]
            if not batch.is_sampling[i] or not is_left[i]:
                continue
            output = _emit(request, result, i)
            outputs.append(output)
            output.count(self.metrics)
            if output.finish_reason is not None:
                del self._requests[request.request_id]
            elif drafts is not None:
                # No row may run past what the request may come to hold.
                room = request.max_output_tokens - request.num_output_tokens
                request.draft_index, request.num_drafts = i, min(drafts.num_drafts[i], room)
        if self.prefix is not None:
            self.prefix.finish(result, is_left)
        self._drop_ended()
        if any(request.num_drafts for request in self._running):
            self._drafts = drafts
        self._is_in_step = False
        return outputs

    def cancel_step(self) -> None:
        """Ends a step that failed somewhere on its way, as if it had not been.

        What it has written is not to be relied on: those that run have to run again.
        """
        self._is_in_step = False
        if self.prefix is not None:
            self.prefix.cancel()
        for request in self._running:
            assert request.row is not None, "a running request has a row"
            self._cache_manager.forget_pooled(request.row)
        self._drop_ended()
        while self._running:
            self._preempt_last()

    def _is_unfinished(self, request: Request) -> bool:
        """Whether it has neither ended nor been aborted; its id may be another's by now."""
        return self._requests.get(request.request_id) is request

    def _drop_ended(self) -> None:
        """Takes back what those hold that have ended or were aborted."""
        ended = [request for request in self._running if not self._is_unfinished(request)]
        self._running = [request for request in self._running if self._is_unfinished(request)]
        for request in ended:
            self._release(request)
        if not self._running:
            self._drafts = None

    def _release(self, request: Request) -> None:
        assert request.row is not None, "a running request has a row"
        self._cache_manager.free(request.row)
        request.row = None
        request.num_computed_tokens = request.num_drafts = 0

    def _preempt_last(self) -> Request:
        """Lets the running request that came last give way."""
        request = self._running.pop()
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)
        return request

    def _choose_running(self, rows: _RowBudget) -> list[tuple[Request, RowSpan]]:
        """The rows of those that run, for which they find blocks, or else give way."""
        chosen = []
        for request in list(self._running):
            if request.row is None:
                break  # It has given way, and so has everybody after it.
            span = rows.take(request, self._max_num_prompt_rows)
            if span is not None and self._reserve(request, span):
                chosen.append((request, span))
        return chosen

    def _reserve(self, request: Request, span: RowSpan) -> bool:
        """Gets a running request the blocks for its rows and what the head runs after them.

        Returns:
            False where it had to give way itself.
        """
        num_tokens = self._num_reserved(request, span.start + span.num_rows)
        while not self._cache_manager.can_extend(span.row, num_tokens):
            if self._preempt_last() is request:
                return False
        self._cache_manager.extend(span.row, num_tokens)
        return True

    def _num_reserved(self, request: Request, end: int) -> int:
        """Positions that need blocks for a step whose rows end before position `end`.

        If all rows are kept, and one more token comes of them, the head's first draft is made of
        the last of these rows, at `end - 1`, and each further one of a row more.
        """
        num_head_rows = max(most_drafts(request, self._num_speculative_tokens) - 1, 0)
        return min(end + num_head_rows, _num_positions(request))

    def _admit(self, rows: _RowBudget) -> list[tuple[Request, RowSpan]]:
        """Lets those that wait run, while there are rows, and blocks for all tokens and a window.

        Everybody that runs must also find the next block that it will need, or somebody would have
        to give way at once.
        """
        manager = self._cache_manager
        admitted: list[tuple[Request, RowSpan]] = []
        num_growing = None
        while self._waiting and rows.num_left and len(self._running) < self._max_num_running:
            request = self._waiting[0]
            window = 1 + most_drafts(request, self._num_speculative_tokens)
            num_tokens = self._num_reserved(request, len(request.token_ids) + window)
            if num_growing is None:
                num_growing = sum(map(self._is_growing, self._running))
            hit = NO_HIT if self.prefix is None else self.prefix.find(request)
            if not manager.can_allocate(num_tokens, num_growing, hit):
                # What is copied is held meanwhile, and so a hit may need a block more.
                hit = NO_HIT
            if not manager.can_allocate(num_tokens, num_growing, hit):
                break
            request.row = manager.allocate(num_tokens, hit)
            if self.prefix is not None:
                self.prefix.admit(request, hit)
            self._running.append(self._waiting.popleft())
            num_growing += self._is_growing(request)
            span = rows.take(request, self._max_num_prompt_rows)
            assert span is not None, "there are rows left"
            admitted.append((request, span))
        return admitted

    def _is_growing(self, request: Request) -> bool:
        """Whether a running request may come to need more blocks than it has."""
        assert request.row is not None, "a running request has a row"
        return not self._cache_manager.covers(request.row, _num_positions(request))

    def _select_drafts(self, requests: list[Request], spans: list[RowSpan]) -> DraftTokens | None:
        """The waiting drafts, brought into the order of the batch."""
        drafts = self._drafts
        num_drafts = [span.num_drafts for span in spans]
        if drafts is None or not any(num_drafts):
            return None
        order = [request.draft_index if request.num_drafts else 0 for request in requests]
        if order == list(range(len(drafts.num_drafts))):
            return replace(drafts, num_drafts=num_drafts)
        return drafts.select(torch.tensor(order, device=drafts.token_ids.device), num_drafts)


class _RowBudget:
    """The rows of one step: first those of the windows, then those of prompts in their order.

    Args:
        num_rows: of the step.
        running: who may ask for them.
    """

    def __init__(self, num_rows: int, running: list[Request]) -> None:
        self.num_left = num_rows
        self._num_set_apart = sum(map(_num_window_rows, running))

    def take(self, request: Request, max_num_certain_rows: int) -> RowSpan | None:
        """The rows that a request gets, or None where none are left for its prompt."""
        assert request.row is not None, "a running request has a row"
        self._num_set_apart = max(self._num_set_apart - _num_window_rows(request), 0)
        room = max(self.num_left - self._num_set_apart, 0)
        num_missing = len(request.token_ids) - request.num_computed_tokens
        num_certain = min(num_missing, max_num_certain_rows, room)
        if not num_certain:
            return None
        # Only where a step is shorter than a single window do drafts find no room.
        num_drafts = min(request.num_drafts, room - num_certain)
        num_rows = num_certain + num_drafts
        self.num_left -= num_rows
        return RowSpan(request.row, request.num_computed_tokens, num_rows, num_drafts)


def _num_window_rows(request: Request) -> int:
    """Rows of a request whose tokens have all run but the newest; 0 of any other."""
    num_missing = len(request.token_ids) - request.num_computed_tokens
    return 1 + request.num_drafts if num_missing == 1 else 0


def _num_positions(request: Request) -> int:
    """Positions that a request can come to need."""
    return request.num_prompt_tokens + request.max_output_tokens


def _emit(request: Request, result: SampledTokens, i: int) -> StepOutput:
    """What request i of a batch emits: its new tokens up to the first that ends the output."""
    run = request.stop_checker.extend(result.output_token_ids[i])
    is_first = not request.num_output_tokens
    request.token_ids += run.token_ids
    text, reason, stop_reason = run.text, run.finish_reason, run.stop_reason
    if result.is_broken[i]:
        text, reason = request.stop_checker.flush(), "error"
        if request.grammar is not None and request.grammar.is_stuck:
            stop_reason = GRAMMAR_STUCK
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
        stop_reason=stop_reason,
        logprobs=None if logprobs is None else list(logprobs[:num_new]),
        prompt_logprobs=None if prompt_logprobs is None else [None, *prompt_logprobs],
        num_cached_tokens=request.num_cached_tokens,
    )
