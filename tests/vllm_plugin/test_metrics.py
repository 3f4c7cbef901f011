"""What vLLM's scheduler counts, and what its log line and its Prometheus series say then."""

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.vllm_plugin import register

pytestmark = pytest.mark.vllm

NUM_DRAFTS = 3


@pytest.fixture(autouse=True)
def hooks() -> None:
    register()


class Step:
    """One step of a scheduler that counts: windows of requests, then what is emitted of each."""

    def __init__(self, make: str = "make_spec_decoding_stats") -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        self.scheduler: Any = object.__new__(Scheduler)
        self.scheduler.log_stats = True
        self.scheduler.num_spec_tokens = NUM_DRAFTS
        self.scheduler.max_model_len = 100
        self.stats: Any = None
        self.is_upstream = make == "upstream"

    def window(self, name: str, drafted: int, invalid: int, tokens: list[int], stop: int) -> None:
        """Args: drafted and invalid drafts; the window's tokens, of which `stop` is the last."""
        from vllm.v1.core.sched.scheduler import Scheduler

        make, update = Scheduler.make_spec_decoding_stats, Scheduler._update_request_with_output
        if self.is_upstream:
            make, update = make.__wrapped__, update.__wrapped__
        self.stats = make(
            self.scheduler,
            self.stats,
            num_draft_tokens=drafted,
            num_accepted_tokens=len(tokens) - 1,
            num_invalid_spec_tokens={name: invalid},
            request_id=name,
        )
        emitted, _ = update(self.scheduler, StoppingRequest(name, stop), list(tokens))
        assert emitted == (tokens[: tokens.index(stop) + 1] if stop in tokens else tokens)

    def counts(self) -> tuple[int, int, int, list[int]]:
        stats = self.stats
        return (
            stats.num_drafts,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            stats.num_accepted_tokens_per_pos,
        )


class StoppingRequest:
    """As much of a request as the check of its end looks at."""

    def __init__(self, name: str, stop: int) -> None:
        self.request_id, self.stop = name, stop
        self.output_token_ids: list[int] = []
        self.sampling_params = SimpleNamespace(
            min_tokens=0,
            eos_token_id=stop,
            ignore_eos=False,
            stop_token_ids=[],
            repetition_detection=None,
        )
        self.pooling_params = None
        self.eos_token_id = stop
        self.spec_decode_metrics: Any = None
        self.num_tokens, self.max_tokens = 0, 100

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def append_output_token_ids(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)


def run(step: Step) -> Step:
    step.window("plain", 3, 0, [5, 6], 1)
    step.window("all kept", 3, 0, [5, 6, 7, 8], 1)
    step.window("cut by the grammar", 3, 2, [5, 6], 1)
    step.window("no valid draft", 3, 3, [5], 1)
    step.window("ends in the window", 3, 0, [5, 1, 7, 8], 1)
    step.window("ends with its bonus token", 3, 0, [5, 6, 7, 1], 1)
    return step


def test_counts_of_a_step() -> None:
    assert run(Step()).counts() == (5, 13, 1 + 3 + 1 + 2 + 3, [5, 3, 2])


def test_upstream_counts_what_was_no_draft_and_what_was_not_emitted() -> None:
    assert run(Step("upstream")).counts() == (6, 13, 1 + 3 + 1 + 3 + 3, [5, 3, 3])


def test_a_step_of_invalid_drafts_alone_has_no_figures() -> None:
    step = Step()
    step.window("no valid draft", 2, 2, [5], 1)
    assert step.stats is None


def test_log_line_and_series_carry_the_figures() -> None:
    from prometheus_client import REGISTRY
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm

    stats = run(Step()).stats
    log, lines = SpecDecodingLogging(), []
    log.observe(stats)
    log.log(lambda text, *values: lines.append(text % values))
    assert "Mean acceptance length: 3.00" in lines[0]
    assert "Per-position acceptance rate: 1.000, 0.600, 0.400" in lines[0]

    config = SimpleNamespace(num_speculative_tokens=NUM_DRAFTS)
    before = set(REGISTRY._collector_to_names)
    prometheus = SpecDecodingProm(config, ["engine"], {0: ["0"]})
    try:
        prometheus.observe(stats, 0)
        sums = [
            REGISTRY.get_sample_value(f"vllm:spec_decode_num_{name}_total", {"engine": "0"})
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        ]
        assert sums == [5, 13, 10]
    finally:
        for collector in set(REGISTRY._collector_to_names) - before:
            REGISTRY.unregister(collector)


def figures(*, log_stats: bool = True, detailed: bool = True) -> Any:
    """Of a request whose text ends at its second token, after 3 of 3 drafts were accepted.

    Called as `Scheduler.update_from_output` does.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    scheduler, request = Step().scheduler, StoppingRequest("a", 1)
    scheduler.log_stats = log_stats
    metrics = request.spec_decode_metrics = RequestSpecDecodeMetrics.new(NUM_DRAFTS)
    for tokens in ([5, 6], [5, 1, 7, 8]):
        num_accepted = len(tokens) - 1
        Scheduler.make_spec_decoding_stats(
            scheduler,
            None,
            num_draft_tokens=3,
            num_accepted_tokens=num_accepted,
            num_invalid_spec_tokens=None,
            request_id="a",
        )
        metrics.observe(num_draft_tokens=3, num_accepted=num_accepted, detailed=detailed)
        Scheduler._update_request_with_output(scheduler, request, list(tokens))
    return metrics


@pytest.mark.parametrize("log_stats", [True, False])
def test_tokens_past_the_end_are_in_no_figure_of_a_request(*, log_stats: bool) -> None:
    metrics = figures(log_stats=log_stats)
    assert metrics.histogram == [0, 1, 1, 0]
    assert metrics.per_step_accepted == [1, 2]
    summary = figures(log_stats=log_stats, detailed=False)
    assert (summary.histogram, summary.per_step_accepted) == ([0, 1, 1, 0], [])


def test_figures_of_one_request() -> None:
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    metrics = RequestSpecDecodeMetrics.new(NUM_DRAFTS)
    for num_draft_tokens, num_accepted in ((3, 2), (0, 0), (1, 0)):
        metrics.observe(num_draft_tokens, num_accepted, detailed=True)
    assert metrics.to_dict()["mean_acceptance_length"] == 2.0
    assert metrics.per_step_drafted == [3, 1]
