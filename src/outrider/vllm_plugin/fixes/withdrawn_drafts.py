"""Sampled drafts that a grammar forbids: a rejection, where vLLM forgets that they were drawn.

Without asynchronous scheduling vLLM cuts a request's drafts before the first one that its grammar
forbids, and the token there is drawn from the target's law. The valid drafts have already had their
share of that law, so they come too often (spec_decode/README.md). With this hook the forbidden
draft stays as the last of its window: the mask makes its probability 0, it is rejected like any
other, and the token comes from the residual.
"""

from __future__ import annotations

from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Any

from outrider.batch import PLACEHOLDER_TOKEN_ID
from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable


def obstacle() -> None:
    """The scheduler is the same on every platform."""


def install() -> None:
    """Keeps the draft where drafts arrive, and tells the mask and the counts what it is."""
    from vllm.v1.core.sched.scheduler import Scheduler

    replace(Scheduler, "update_draft_token_ids", _keeping_the_first)
    replace(Scheduler, "schedule", _counting)
    replace(Scheduler, "get_grammar_bitmask", _masking)


def _keeping_the_first(update: Callable[..., None]) -> Callable[..., None]:
    def keeping_the_first(self: Any, draft_token_ids: Any) -> None:
        update(self, draft_token_ids)
        are_drawn = _are_judged_by_their_law(self.vllm_config.speculative_config)
        for name, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(name)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            place = len(request.spec_token_ids)
            is_kept = are_drawn and _is_forbidden(self, request, drafts, place)
            if is_kept:
                request.spec_token_ids = [*request.spec_token_ids, drafts[place]]
            request.withdrawn_place = place if is_kept else None

    return keeping_the_first


def _are_judged_by_their_law(config: Any) -> bool:
    """Whether drafts are drawn, and a probability of 0 is a rejection.

    The rule "synthetic" asks no law, and may emit a draft that stays.
    """
    return (
        config is not None
        and config.draft_sample_method == "probabilistic"
        and config.rejection_sample_method != "synthetic"
    )


def _is_forbidden(scheduler: Any, request: Any, drafts: list[int], place: int) -> bool:
    """Whether a drawn draft is there that the grammar, and not a limit, took out."""
    if place >= len(drafts) or not request.use_structured_output:
        return False
    if request.sampling_params.temperature == 0:
        # Nothing was drawn, and the token after the valid drafts is the same.
        return False
    bounds = scheduler.structured_output_manager._get_constraint_bounds(request, drafts)
    return bool(bounds.constraint_start <= place)


def _counting(schedule: Callable[..., Any]) -> Callable[..., Any]:
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        num_invalid = {}
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            # The budget of the step may have cut it, as it cuts any draft.
            place = getattr(self.requests[name], "withdrawn_place", None)
            if place is not None and place < len(drafts):
                num_invalid[name] = 1
        if num_invalid:
            output.num_invalid_spec_tokens = num_invalid
        return output

    return counting


def _masking(get_bitmask: Callable[..., Any]) -> Callable[..., Any]:
    def masking(self: Any, scheduler_output: Any) -> Any:
        withdrawn = scheduler_output.num_invalid_spec_tokens
        if withdrawn:
            drafts = {
                name: [*ids[:-1], PLACEHOLDER_TOKEN_ID] if name in withdrawn else ids
                for name, ids in scheduler_output.scheduled_spec_decode_tokens.items()
            }
            scheduler_output = with_fields(scheduler_output, scheduled_spec_decode_tokens=drafts)
        return get_bitmask(self, scheduler_output)

    return masking
