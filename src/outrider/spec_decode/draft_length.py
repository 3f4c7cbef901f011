"""How many tokens to draft for a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.request import Request


def draft_length(request: Request, num_new_tokens: int, num_speculative_tokens: int) -> int:
    """K of the next window, clipped so that even a full run ends at the request's cap.

    A window emits at most K + 1 tokens, so K drafts are of use only while K + 1 may be emitted.

    Args:
        request: before it takes up the tokens of this step.
        num_new_tokens: what it is about to take up.
        num_speculative_tokens: K of the engine.
    """
    wanted = request.params.num_speculative_tokens
    if wanted is None:
        wanted = num_speculative_tokens
    room = request.max_output_tokens - request.num_output_tokens - num_new_tokens - 1
    return max(min(wanted, num_speculative_tokens, room), 0)
