"""A scheduler over one paged group, stepped by hand: no model, and tokens that are all alike."""

from collections.abc import Callable
from typing import Any

import torch

from outrider.batch import DraftTokens, SampledTokens, ScheduledBatch
from outrider.cache.cache_manager import CacheManager
from outrider.cache.groups import GroupSpec, Rollback, TensorSpec
from outrider.engine.scheduler import Scheduler
from outrider.request import Request
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.draft_length import draft_length
from outrider.stop_checker import StopChecker

TOKEN, EOS = 1, 2
BLOCK_SIZE = 4
CPU = torch.device("cpu")


class ScriptedSteps:
    """Steps in which a script says how many drafts of each request are kept.

    Args:
        k: drafts of each request, clipped as the head clips them.
        num_blocks: of four positions each.
        options: of the scheduler; `max_num_seqs` of the caches.
    """

    def __init__(self, k: int, num_blocks: int, **options: Any) -> None:
        self.k = k
        spec = TensorSpec("keys", (1,), Rollback.TRUNCATE)
        self.manager = CacheManager(
            [GroupSpec("group", True, 1, (spec,))],
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=options.pop("max_num_seqs", 8),
            max_model_len=256,
            num_pending_rows=k,
            dtype=torch.float32,
            device=CPU,
        )
        self.scheduler = Scheduler(
            self.manager,
            num_speculative_tokens=k,
            **{"max_num_batched_tokens": 64, **options},
        )
        self.requests: dict[str, Request] = {}

    def add(self, name: str, num_prompt: int, max_tokens: int, **options: Any) -> Request:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
        request = Request(
            request_id=name,
            token_ids=[TOKEN] * num_prompt,
            num_prompt_tokens=num_prompt,
            params=params,
            max_output_tokens=max_tokens,
            stop_checker=StopChecker(params, frozenset([EOS]), max_tokens, None),
            seed=0,
        )
        self.requests[name] = request
        self.scheduler.add(request)
        return request

    def schedule(self) -> dict[str, tuple[int, int, int]]:
        """The rows of a step that is left open: start, certain rows and drafts by request."""
        self.batch = self.scheduler.schedule()
        return rows_of(self.batch)

    def finish(self, kept: Callable[[str, int], int] = lambda name, drafts: drafts) -> Any:
        """Ends the step that was left open; `kept` takes a request's id and number of drafts."""
        batch, accepted, outputs, drafts = self.batch, [], [], []
        for request, span, is_sampling in zip(
            batch.requests, batch.spans, batch.is_sampling, strict=True
        ):
            accepted.append(kept(request.request_id, span.num_drafts) if is_sampling else 0)
            outputs.append([TOKEN] * (accepted[-1] + 1) if is_sampling else [])
            length = draft_length(request, len(outputs[-1]), self.k) if is_sampling else 0
            drafts.append(length)
        size = len(batch.requests)
        result = SampledTokens(
            accepted,
            outputs,
            [False] * size,
            [span.num_drafts for span in batch.spans],
            [0] * size,
            [None] * size,
        )
        self.manager.commit(batch.spans, accepted)
        drafted = DraftTokens(torch.full((size, max(self.k, 1)), TOKEN), None, drafts)
        updates = self.scheduler.update(batch, result, drafted if any(drafts) else None)
        self.manager.check_integrity()
        return updates

    def step(
        self, kept: Callable[[str, int], int] = lambda name, drafts: drafts
    ) -> dict[str, tuple[int, int, int]]:
        """One step; returns its rows."""
        rows = self.schedule()
        self.finish(kept)
        return rows

    def run(self, max_num_steps: int = 500) -> None:
        """Steps until all have ended."""
        for _ in range(max_num_steps):
            if not self.scheduler.has_unfinished_requests:
                return
            self.step()
        raise AssertionError("requests do not end")

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler._running]

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler._waiting]

    def blocks(self, name: str) -> int:
        """How many a running request holds."""
        row = self.requests[name].row
        assert row is not None
        return len(self.manager.block_tables["group"].blocks(row))

    @property
    def num_free_blocks(self) -> int:
        return self.manager.block_tables["group"].pool.num_free


def rows_of(batch: ScheduledBatch) -> dict[str, tuple[int, int, int]]:
    return {
        request.request_id: (span.start, span.num_certain_rows, span.num_drafts)
        for request, span in zip(batch.requests, batch.spans, strict=True)
    }
