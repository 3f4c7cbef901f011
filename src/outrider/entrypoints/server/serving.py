"""Runs requests on the engine: a bounded queue in front, an abort when a client leaves."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from outrider.entrypoints.server.errors import ApiError, invalid
from outrider.errors import EngineDeadError, RequestError
from outrider.structured_outputs import GRAMMAR_STUCK

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from outrider.entrypoints.prompt_encoder import EncodedPrompt
    from outrider.entrypoints.server.engine_client import EngineClient
    from outrider.entrypoints.server.metrics import RequestProgress, ServerMetrics
    from outrider.outputs import RequestOutput
    from outrider.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_MAX_RETRY_AFTER_S = 60
# Weight of the last completion in the running mean of how long one takes.
_NEWEST_WEIGHT = 0.2


class Serving:
    """All requests that are not finished.

    Args:
        llm: runs them.
        metrics: counts them.
        max_num_seqs: completions that run at once.
        max_num_queued: completions that may wait for those.
    """

    def __init__(
        self, llm: EngineClient, metrics: ServerMetrics, max_num_seqs: int, max_num_queued: int
    ) -> None:
        self._llm = llm
        self._metrics = metrics
        self._max_num_seqs = max_num_seqs
        self._max_num_unfinished = max_num_seqs + max_num_queued
        self._num_unfinished = 0
        self._mean_seconds = 0.0
        self._running: set[Generation] = set()
        self._is_death_reported = False
        self.is_draining = False

    def check_alive(self) -> None:
        """Raises the 503 of an engine that is dead, or of a server that is about to end."""
        if not self._llm.is_running:
            raise _engine_is_dead()
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", headers={"connection": "close"})

    def check_open(self) -> None:
        """Raises the 503 of `check_alive`, or the 429 of a queue without a place left.

        A request is asked here before its prompts are read, which takes longer.
        """
        self.check_alive()
        if self._num_unfinished >= self._max_num_unfinished:
            raise self._queue_is_full()

    def open(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        request_id: str,
        explain: Callable[[RequestError], ApiError],
        *,
        shows_output: bool = True,
    ) -> Generation:
        """Admits a request, all its prompts or none.

        Args:
            prompts: at least one.
            params: of each.
            request_id: unique.
            explain: makes the answer of an error in the request.
            shows_output: false where only the prompts are wanted, and no token counts as emitted.

        Raises:
            ApiError: it can never run, or not now.
        """
        self.check_alive()
        for prompt in prompts:
            try:
                self._llm.check_request(prompt.token_ids, params)
            except RequestError as error:
                answer = explain(error)
                if prompt.name and answer.param in ("prompt", "messages"):
                    answer.message, answer.param = f"{prompt.name}: {answer.message}", prompt.name
                raise answer from None
        count = len(prompts) * params.n
        if count > self._max_num_unfinished:
            raise invalid(
                "n" if len(prompts) == 1 else "prompt",
                f"the request asks for {count} completions, and the server runs and queues "
                f"{self._max_num_unfinished} at most",
            )
        if self._num_unfinished + count > self._max_num_unfinished:
            raise self._queue_is_full()
        progress = self._metrics.progress(
            [len(prompt.token_ids) for prompt in prompts], params.n, shows_output=shows_output
        )
        generation = Generation(self._llm, progress, prompts, params, request_id, explain)
        self._num_unfinished += count
        self._running.add(generation)
        generation.on_close = self._forget
        generation.on_death = self._report_death
        return generation

    async def abort_all(self) -> None:
        """Ends every request that runs; each is answered with an error."""
        request_ids = [one for generation in self._running for one in generation.abort()]
        # All between the same two steps.
        await self._llm.abort(request_ids)

    def _report_death(self, error: EngineDeadError) -> None:
        """Writes into the log, once, what those whose requests ended are not told."""
        if not self._is_death_reported:
            self._is_death_reported = True
            logger.error("%s", error, exc_info=error.__cause__)

    def _forget(self, generation: Generation) -> None:
        self._running.discard(generation)
        self._num_unfinished -= generation.num_completions
        if generation.end_reason is None:
            return  # It was refused, which takes no time.
        newest = time.monotonic() - generation.arrival_time
        self._mean_seconds += _NEWEST_WEIGHT * (newest - self._mean_seconds)

    def _queue_is_full(self) -> ApiError:
        return ApiError(
            429,
            f"{self._num_unfinished} completions run or wait, and the server runs and queues "
            f"{self._max_num_unfinished} at most (--max-num-queued): try again",
            code="queue_full",
            headers={"retry-after": str(self._retry_after_s())},
        )

    def _retry_after_s(self) -> int:
        """Seconds until a place may be free: those in front, at the pace of the last ones."""
        rounds = self._num_unfinished / self._max_num_seqs
        return min(max(math.ceil(rounds * self._mean_seconds), 1), _MAX_RETRY_AFTER_S)


class Generation:
    """The outputs of one request of a client, of all its prompts, as they come.

    Iterating yields `(index of the prompt, output)`. It must be closed, which aborts what has not
    ended.
    """

    def __init__(
        self,
        llm: EngineClient,
        progress: RequestProgress,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        request_id: str,
        explain: Callable[[RequestError], ApiError],
    ) -> None:
        self.num_completions = len(prompts) * params.n
        self.on_close: Callable[[Generation], None] | None = None
        self.on_death: Callable[[EngineDeadError], None] | None = None
        self._llm = llm
        self._prompts = prompts
        self._params = params
        self._explain = explain
        self._request_ids = [f"{request_id}-{index}" for index in range(len(prompts))]
        self._progress = progress
        self._stream = self._one(0) if len(prompts) == 1 else self._merged()
        self._first: tuple[int, RequestOutput] | None = None
        self._is_aborted = False
        # What outputs count as that have not ended by themselves; None is not at all.
        self.end_reason: str | None = "abort"

    @property
    def arrival_time(self) -> float:
        """When the request was admitted, in seconds of `time.monotonic`."""
        return self._progress.arrival_time

    async def start(self) -> None:
        """Waits for the first output, so that an error is known before anything is answered."""
        self._first = await self._next()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await self._next()

    def abort(self) -> list[str]:
        """Lets whoever iterates get an error, and says which requests the engine is to end."""
        self._is_aborted = True
        return self._request_ids

    async def aclose(self) -> None:
        """Aborts what has not ended, and forgets the request."""
        if self.on_close is None:
            return
        on_close, self.on_close = self.on_close, None
        on_close(self)
        self._progress.close(self.end_reason)
        await self._stream.aclose()

    async def _next(self) -> tuple[int, RequestOutput]:
        try:
            index, output = await anext(self._stream)
        except EngineDeadError as error:
            self.end_reason = "error"
            if self.on_death is not None:
                self.on_death(error)
            raise _engine_is_dead() from None
        except RequestError as error:
            self.end_reason = None
            raise self._explain(error) from None
        self._progress.observe(index, output)
        reasons = [completion.finish_reason for completion in output.outputs]
        if "abort" in reasons or (self._is_aborted and not output.finished):
            raise ApiError(503, "the server is shutting down: the request was aborted")
        ends = {(one.finish_reason, one.stop_reason) for one in output.outputs}
        if ("error", GRAMMAR_STUCK) in ends:
            raise self._explain(
                RequestError(
                    f"{GRAMMAR_STUCK} leads to a text that nothing can follow, or takes too long "
                    "to be followed: it is ambiguous"
                )
            )
        if "error" in reasons:
            raise ApiError(500, "the model's probabilities were not finite")
        return index, output

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        outputs = self._llm.generate(self._prompts[index], self._params, self._request_ids[index])
        async with aclosing(outputs):
            async for output in outputs:
                yield index, output

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of all prompts in the order in which they come."""
        # A slow client keeps the outputs waiting in the engine's front end, where they merge.
        queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(1)

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._one(index)) as outputs:
                    async for item in outputs:
                        await queue.put(item)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self._prompts))]
        try:
            num_left = len(tasks)
            while num_left:
                item = await queue.get()
                if item is None:
                    num_left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


def _engine_is_dead() -> ApiError:
    return ApiError(503, "the engine has stopped after an error; see the log of the server")
