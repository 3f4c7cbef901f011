"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.logprobs import TokenLogprobs
    from outrider.sampling_params import SamplingParams
    from outrider.stop_checker import StopChecker
    from outrider.structured_outputs import OutputGrammar


@dataclass(eq=False)
class Request:
    """A prompt, what was emitted so far, and where its state lies.

    Attributes:
        request_id: unique among the requests that are not finished.
        token_ids: prompt, then output.
        num_prompt_tokens: how many of them are the prompt.
        params: what was asked for.
        max_output_tokens: emitted at most, already cut to what max_model_len leaves.
        stop_checker: where the output ends, and its text.
        seed: of the random streams.
        choice: index among the choices of one user request, part of the random key.
        bad_words_token_ids: sequences that the output must not hold, none empty.
        grammar: what the output has to follow; None where it may be anything.
        prompt_logprobs: of the prompt's tokens from the second on, as far as it has run; None
            where the request asks for none.
        num_computed_tokens: rows that have run and are kept; set by the scheduler.
        row: place in the cache tables, None while waiting; set by the scheduler.
        draft_index: row of the last `DraftTokens`; meaningless while num_drafts is 0.
        num_drafts: drafts that wait to be verified; set by the scheduler.
        num_preemptions: times that it lost its caches and had to run again.
        cache_salt: only requests with the same one share what they have run; None is one too.
        block_hashes: of its whole blocks, as far as somebody has asked for them.
        num_cached_tokens: of its prompt, those that did not have to run; None until it is let in.
        num_known_tokens: tokens at its beginning whose blocks were found when it was let in.
        num_left_blocks: blocks that it has left to others since then.
        last_snapshot: blocks before the last snapshot of its output, None before the first.
        has_sound_head: whether the head has not broken over it.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    max_output_tokens: int
    stop_checker: StopChecker
    seed: int
    choice: int = 0
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    grammar: OutputGrammar | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_computed_tokens: int = field(default=0)
    row: int | None = None
    draft_index: int = 0
    num_drafts: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_known_tokens: int = 0
    num_left_blocks: int = 0
    last_snapshot: int | None = None
    has_sound_head: bool = True

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were emitted so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @cached_property
    def distinct_prompt_ids(self) -> tuple[int, ...]:
        """The ids that the prompt holds."""
        return tuple(set(self.token_ids[: self.num_prompt_tokens]))

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end the output, the end-of-sequence ids included unless ignored."""
        return self.stop_checker.stop_token_ids
