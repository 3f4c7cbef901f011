"""What comes out: per step for a front end, per request for a user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class StepOutput:
    """What one request emitted in one step.

    Attributes:
        request_id: as given to `add_request`.
        new_token_ids: emitted in this step, after the cut at a stop or at the cap.
        num_draft_tokens: drafts that were verified.
        num_accepted_tokens: drafts among `new_token_ids`.
        finish_reason: None while the request goes on; "error" where the model's probabilities were
            not finite.
        stop_reason: the id that stopped it, where it is not the end-of-sequence id.
    """

    request_id: str
    new_token_ids: list[int]
    num_draft_tokens: int
    num_accepted_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass
class CompletionOutput:
    """One completion.

    Attributes:
        index: among the completions of the request.
        text: decoded, without special tokens.
        token_ids: what the text was decoded from, and the stop token.
        finish_reason: "stop", "length" or "error"; None while it goes on.
        stop_reason: the id that stopped it, where it is not the end-of-sequence id.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        request_id: unique.
        prompt: text, or None where ids were given.
        prompt_token_ids: what was run.
        outputs: completions.
        finished: all of them have ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
