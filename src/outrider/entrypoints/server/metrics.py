"""Figures for Prometheus, under vLLM's names and with its types.

What drafting brought comes from the engine's own counters at the moment of the scrape; times and
tokens are counted as outputs pass through the server. Tokens are those that are emitted: accepted,
recovered and bonus, none past the end of an output.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.core import Metric

    from outrider.entrypoints.server.engine_client import EngineStats
    from outrider.outputs import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
_LABELS = ("model_name", "engine")
# Seconds: 1, 2.5 and 5 of each power of ten.
_BUCKETS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1, 2.5, 5))


class ServerMetrics:
    """All figures of one server, in a registry of its own.

    Args:
        model_name: the label.
        read_stats: figures of the engine.
    """

    def __init__(self, model_name: str, read_stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        labels = (model_name, "0")

        def counter(name: str, text: str) -> Counter:
            made = Counter(f"vllm:{name}", text, _LABELS, registry=self._registry)
            return made.labels(*labels)

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(
                f"vllm:{name}_seconds", text, _LABELS, registry=self._registry, buckets=_BUCKETS
            )
            return made.labels(*labels)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, once for all choices.")
        self.generation_tokens = counter("generation_tokens", "Tokens emitted.")
        self.time_to_first_token = histogram(
            "time_to_first_token", "From a request to the first token of each choice."
        )
        self.inter_token_latency = histogram(
            "inter_token_latency",
            "Between two tokens of a choice; tokens of one step share its time evenly.",
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency", "From a request to the end of each choice."
        )
        success = Counter(
            "vllm:request_success",
            "Choices that ended.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self.request_success = {
            reason: success.labels(*labels, reason) for reason in FINISH_REASONS
        }
        self._registry.register(_EngineCollector(labels, read_stats))

    def text(self) -> bytes:
        """Everything in the text format of Prometheus."""
        return generate_latest(self._registry)

    def progress(
        self, num_prompt_tokens: Sequence[int], n: int, *, shows_output: bool = True
    ) -> RequestProgress:
        """What counts one request, which arrives now.

        Args:
            num_prompt_tokens: of each of its prompts.
            n: choices of each prompt.
            shows_output: false where the answer has none of the tokens.
        """
        return RequestProgress(self, num_prompt_tokens, n, shows_output)


class RequestProgress:
    """Counts the outputs of one request of a client."""

    def __init__(
        self, metrics: ServerMetrics, num_prompt_tokens: Sequence[int], n: int, shows_output: bool
    ) -> None:
        self.arrival_time = time.monotonic()
        self._metrics = metrics
        self._shows_output = shows_output
        self._num_prompt_tokens = dict(enumerate(num_prompt_tokens))
        self._last_token_times: dict[tuple[int, int], float] = {}
        self._unfinished = {(i, k) for i in range(len(num_prompt_tokens)) for k in range(n)}

    def observe(self, index: int, output: RequestOutput) -> None:
        """Counts what came of prompt `index`."""
        now, metrics = time.monotonic(), self._metrics
        # A prompt has run when its first output comes.
        metrics.prompt_tokens.inc(self._num_prompt_tokens.pop(index, 0))
        for completion in output.outputs:
            key = (index, completion.index)
            num_new = len(completion.token_ids)
            if num_new and self._shows_output:
                self._count_tokens(key, num_new, now)
            if completion.finish_reason is not None and key in self._unfinished:
                self._unfinished.discard(key)
                metrics.request_success[completion.finish_reason].inc()
                metrics.e2e_request_latency.observe(now - self.arrival_time)

    def close(self, reason: str | None) -> None:
        """Counts what will not end any more.

        Args:
            reason: one of `FINISH_REASONS`; None where the request was refused, and counts nowhere.
        """
        if reason is not None:
            self._metrics.request_success[reason].inc(len(self._unfinished))
        self._unfinished.clear()

    def _count_tokens(self, key: tuple[int, int], num_new: int, now: float) -> None:
        self._metrics.generation_tokens.inc(num_new)
        last = self._last_token_times.get(key)
        self._last_token_times[key] = now
        if last is None:
            self._metrics.time_to_first_token.observe(now - self.arrival_time)
            return
        for _ in range(num_new):
            self._metrics.inter_token_latency.observe((now - last) / num_new)


class _EngineCollector(Collector):
    """Reads the engine's figures when somebody asks."""

    def __init__(self, labels: tuple[str, ...], read_stats: Callable[[], EngineStats]) -> None:
        self._labels = labels
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        """Figures of this moment."""
        stats = self._read_stats()
        drafting = stats.spec_decode
        for name, text, value in (
            ("num_requests_running", "Completions that run.", stats.num_running),
            ("num_requests_waiting", "Completions that wait.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", stats.kv_cache_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Times that a request lost its caches.", stats.num_preemptions),
            (
                "prefix_cache_queries",
                "Tokens that were looked for in the prefix cache.",
                stats.num_prefix_queried_tokens,
            ),
            (
                "prefix_cache_hits",
                "Tokens that were found in the prefix cache.",
                stats.num_prefix_hit_tokens,
            ),
            (
                "spec_decode_num_drafts",
                "Windows with one valid draft or more.",
                drafting.num_drafts,
            ),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", drafting.num_draft_tokens),
            (
                "spec_decode_num_accepted_tokens",
                "Drafted tokens that were emitted.",
                drafting.num_accepted_tokens,
            ),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were emitted, by place in the window.",
            labels=(*_LABELS, "position"),
        )
        for position, count in enumerate(drafting.num_accepted_tokens_per_pos):
            per_position.add_metric((*self._labels, str(position)), count)
        yield per_position
