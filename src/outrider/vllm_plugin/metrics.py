"""What vLLM's scheduler counts of drafts, by the definitions of this package's metrics.

A draft counts if it had a valid token: structured output can leave none, and vLLM counts it all the
same, which lowers the mean acceptance length and the rates by position. An accepted token counts
if it was emitted: an end-of-text id, a stop token id or the limit of tokens in the middle of a
window cuts those after it. (A stop string is found after the count, by vLLM's front end, so that
tokens behind it in its window are counted.) The line of the log, the Prometheus series and the
figures of each request are fed from these counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable


def obstacle() -> None:
    """The scheduler is the same on every platform."""


def install() -> None:
    """Corrects the counts where the scheduler makes them."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    replace(Scheduler, "make_spec_decoding_stats", _valid_drafts)
    replace(Scheduler, "_update_request_with_output", _emitted_tokens)
    replace(RequestSpecDecodeMetrics, "observe", _valid_drafts_of_request)


def _valid_drafts(make_stats: Callable[..., Any]) -> Callable[..., Any]:
    def valid_drafts(
        self: Any,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        num_invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        if num_draft_tokens <= num_invalid:
            return spec_decoding_stats
        stats = make_stats(
            self,
            spec_decoding_stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_invalid_spec_tokens=num_invalid_spec_tokens,
            request_id=request_id,
        )
        # The scheduler learns next how much of this request's window is emitted.
        self.window_in_progress = (request_id, stats, num_accepted_tokens)
        return stats

    return valid_drafts


def _emitted_tokens(update_request: Callable[..., Any]) -> Callable[..., Any]:
    def emitted_tokens(
        self: Any, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        emitted, is_stopped = update_request(self, request, new_token_ids, *args, **kwargs)
        request_id, stats, num_accepted = getattr(self, "window_in_progress", (None, None, 0))
        self.window_in_progress = (None, None, 0)
        if request_id != request.request_id or len(emitted) >= num_accepted:
            return emitted, is_stopped
        if stats is not None:
            for position in range(len(emitted), num_accepted):
                stats.num_accepted_tokens -= 1
                stats.num_accepted_tokens_per_pos[position] -= 1
        if request.spec_decode_metrics is not None:
            _correct_last(request.spec_decode_metrics, num_accepted, len(emitted))
        return emitted, is_stopped

    return emitted_tokens


def _correct_last(metrics: Any, num_accepted: int, num_emitted: int) -> None:
    """Moves the window that a request's figures have last to what was emitted of it."""
    metrics.histogram[num_accepted] -= 1
    metrics.histogram[num_emitted] += 1
    if metrics.per_step_accepted:
        metrics.per_step_accepted[-1] = num_emitted


def _valid_drafts_of_request(observe: Callable[..., None]) -> Callable[..., None]:
    def valid_drafts_of_request(
        self: Any, num_draft_tokens: int, num_accepted: int, detailed: bool = False
    ) -> None:
        if num_draft_tokens > 0:
            observe(self, num_draft_tokens, num_accepted, detailed)

    return valid_drafts_of_request
