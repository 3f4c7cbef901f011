"""What comes out: per step for a front end, per request for a user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.logprobs import LogprobsOfPosition, TokenLogprobs
    from outrider.spec_decode.metrics import SpecDecodeMetrics
    from outrider.stop_checker import FinishReason


@dataclass(frozen=True)
class StepOutput:
    """What one request emitted in one step.

    Attributes:
        request_id: as given to `add_request`.
        new_token_ids: emitted in this step, after the cut at a stop or at the cap. The first
            `num_accepted_tokens` are accepted drafts; one more is recovered, bonus or plain.
        new_text: what became certain of the text; empty without a tokenizer.
        num_draft_tokens: drafts that were verified.
        num_accepted_tokens: drafts among `new_token_ids`.
        num_fallbacks: rows of its window that were not finite, or held no residual mass, and were
            worked around.
        finish_reason: None while the request goes on; "error" where the model's probabilities were
            not finite.
        stop_reason: the id or text that stopped it, where it is not the end-of-sequence id.
        logprobs: one for each of `new_token_ids`, or None where the request asks for none.
        prompt_logprobs: with the first output of a request that asks for them: None for the first
            token of the prompt, then one for each.
        num_cached_tokens: tokens of the prompt that did not have to run, since others had run
            them; None where the engine keeps nothing to share.
    """

    request_id: str
    new_token_ids: list[int]
    new_text: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_fallbacks: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None

    def count(self, metrics: SpecDecodeMetrics) -> None:
        """Adds this step to the sums of whoever counts it: the engine, a request, a run."""
        metrics.observe(
            self.num_draft_tokens,
            self.num_accepted_tokens,
            len(self.new_token_ids),
            self.num_fallbacks,
        )


@dataclass(frozen=True)
class DecodeStep:
    """What one pass of the target brought a completion.

    Attributes:
        num_tokens: emitted.
        num_draft_tokens: drafts that were verified, those past the end of the output too.
        num_accepted_tokens: drafts among the tokens, which come first.
    """

    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def token_sources(self) -> list[str]:
        """Where each token came from.

        "accepted_1" is the first draft of the pass. After the drafts that were kept comes at most
        one token of the target's own: "recovered" in the place of a draft that was refused,
        "bonus" after the last draft, "plain" where there was none.
        """
        sources = [f"accepted_{depth}" for depth in range(1, self.num_accepted_tokens + 1)]
        if self.num_tokens > self.num_accepted_tokens:
            is_refused = self.num_accepted_tokens < self.num_draft_tokens
            own = "bonus" if self.num_draft_tokens else "plain"
            sources.append("recovered" if is_refused else own)
        return sources


@dataclass
class CompletionOutput:
    """One completion.

    Attributes:
        index: among the completions of the request.
        text: decoded.
        token_ids: what the text was decoded from, and the stop token.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        stop_reason: the id or text that stopped it, where it is not the end-of-sequence id.
        logprobs: one entry for each of `token_ids`, or None where none were asked for.
        cumulative_logprob: sum over `token_ids`, or None where no logprobs were asked for.
        steps: the passes that `token_ids` came from, in their order.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobsOfPosition] | None = None
    cumulative_logprob: float | None = None
    steps: list[DecodeStep] = field(default_factory=list)


@dataclass
class RequestMetrics:
    """When things happened to a request, and what drafting brought it.

    Times are seconds of `time.monotonic`.

    Attributes:
        arrival_time: it was added.
        first_token_time: its first token came out, of whichever completion; None before.
        finished_time: its last completion ended; None before.
        spec_decode: sums over its completions; those of all requests add up to the engine's.
    """

    arrival_time: float
    spec_decode: SpecDecodeMetrics
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        request_id: unique.
        prompt: text, or None where ids were given.
        prompt_token_ids: what was run.
        outputs: completions.
        finished: all of them have ended.
        prompt_logprobs: None for the first token, then one entry for each; None where none were
            asked for.
        metrics: times and what drafting brought; None where nobody counts.
        num_cached_tokens: tokens of the prompt that did not have to run for the first completion;
            None until that has begun, and where the engine keeps nothing to share.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[LogprobsOfPosition | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
