"""What the server needs of an engine, and how `AsyncLLM` gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from outrider.entrypoints.async_llm import AsyncLLM
    from outrider.entrypoints.prompt_encoder import EncodedPrompt
    from outrider.outputs import RequestOutput
    from outrider.sampling_params import SamplingParams
    from outrider.spec_decode.metrics import SpecDecodeMetrics


@dataclass(frozen=True)
class EngineStats:
    """Figures of an engine at one moment.

    Attributes:
        spec_decode: sums over all requests so far.
        num_running: completions that have a place in the caches.
        num_waiting: completions that wait for one.
        num_preemptions: times that a running one lost its place.
        kv_cache_usage: share of the paged caches in use, of the fullest group, 0 to 1.
        num_prefix_queried_tokens: tokens that completions began with.
        num_prefix_hit_tokens: those of them that did not have to run.
    """

    spec_decode: SpecDecodeMetrics
    num_running: int
    num_waiting: int
    num_preemptions: int
    kv_cache_usage: float
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0


class EngineClient(Protocol):
    """An engine that runs beside the event loop and never blocks it."""

    @property
    def is_running(self) -> bool:
        """Whether it takes requests; an engine that died of an error does not."""
        ...

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises the RequestError that `generate` would."""
        ...

    def generate(
        self, prompt: EncodedPrompt, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a prompt; closing it aborts the request.

        Raises:
            RequestError: before the first output.
            EngineDeadError: the engine died.
        """
        ...

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; the last output of each has the finish reason "abort"."""
        ...

    def stats(self) -> EngineStats:
        """Figures of this moment."""
        ...


class AsyncLLMClient:
    """The engine of an `AsyncLLM`.

    What is read here of the engine while its thread steps is either constant or a number that is
    read at once, so no figure is torn; those of one scrape may lie a step apart.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._llm.is_running

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises the RequestError that `generate` would."""
        self._llm.llm_engine.check_request(prompt_token_ids, params)

    def generate(
        self, prompt: EncodedPrompt, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a prompt."""
        given = {"prompt_token_ids": prompt.token_ids, "cache_salt": prompt.cache_salt}
        outputs = self._llm.generate(given, params, request_id)
        # Declared as an iterator, made as a generator.
        return cast("AsyncGenerator[RequestOutput, None]", outputs)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests."""
        await self._llm.abort(request_ids)

    def stats(self) -> EngineStats:
        """Figures of this moment."""
        engine = self._llm.llm_engine
        pools = [table.pool for table in engine.cache_manager.block_tables.values()]
        # One block of a pool is the null block, which nobody gets.
        usage = max((1 - pool.num_free / max(pool.num_blocks - 1, 1) for pool in pools), default=0)
        prefix = engine.scheduler.prefix
        return EngineStats(
            spec_decode=engine.metrics,
            num_running=engine.scheduler.num_running,
            num_waiting=engine.scheduler.num_waiting,
            num_preemptions=engine.scheduler.num_preemptions,
            kv_cache_usage=usage,
            num_prefix_queried_tokens=0 if prefix is None else prefix.num_queried_tokens,
            num_prefix_hit_tokens=0 if prefix is None else prefix.num_hit_tokens,
        )
