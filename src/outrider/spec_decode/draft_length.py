"""How many tokens to draft for a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.request import Request


def draft_length(
    request: Request,
    num_new_tokens: int,
    num_speculative_tokens: int,
    max_model_len: int | None = None,
) -> int:
    """K of the next window, clipped so that even a full run ends at the request's cap.

    A window emits at most K + 1 tokens, so K drafts are of use only while K + 1 may be emitted.
    The result never grows again where one of the limits has brought it to 0.

    Args:
        request: before it takes up the tokens of this step.
        num_new_tokens: what it is about to take up.
        num_speculative_tokens: K of the engine.
        max_model_len: of the proposer: positions from here on get no draft. None is no such limit,
            and one above the engine's own changes nothing.
    """
    num_tokens = len(request.token_ids) + num_new_tokens
    end = request.num_prompt_tokens + request.max_output_tokens - 1
    if max_model_len is not None:
        end = min(end, max_model_len)
    return max(min(most_drafts(request, num_speculative_tokens), end - num_tokens), 0)


def most_drafts(request: Request, num_speculative_tokens: int) -> int:
    """K of a request where nothing clips it: what it asks for, at most K of the engine."""
    wanted = request.params.num_speculative_tokens
    return num_speculative_tokens if wanted is None else min(wanted, num_speculative_tokens)


def head_runs(
    request: Request,
    num_new_tokens: int,
    num_speculative_tokens: int,
    max_model_len: int | None = None,
) -> bool:
    """Whether the head runs a request's rows, be it for others alone: it drafts, within its limit.

    Args:
        request: as for `draft_length`.
        num_new_tokens: what it is about to take up.
        num_speculative_tokens: K of the engine.
        max_model_len: of the proposer, as for `draft_length`.
    """
    is_within = max_model_len is None or len(request.token_ids) + num_new_tokens < max_model_len
    return is_within and most_drafts(request, num_speculative_tokens) > 0
