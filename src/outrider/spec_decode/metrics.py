"""Counts what drafting brought: how many drafts were kept, and how many tokens a pass was worth.

The engine observes one entry per request and step, after the step's tokens were cut at the end of
the request; the command line and the server print the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict


class SpecDecodeStats(TypedDict):
    """The counts and rates under the names that the command line prints as JSON."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    mean_acceptance_length: float
    acceptance_rate: float
    tokens_per_target_pass: float


@dataclass
class SpecDecodeMetrics:
    """Sums over requests and steps.

    Attributes:
        num_speculative_tokens: positions listed from the start; longer drafts add more.
        num_target_passes: request-steps; in each the target ran over a window of the request.
        num_drafts: request-steps with at least one valid draft token.
        num_draft_tokens: valid draft tokens, those past a cut too.
        num_accepted_tokens: draft tokens kept and emitted.
        num_emitted_tokens: tokens emitted: accepted, recovered and bonus.
        num_draft_tokens_per_pos: drafts that had a valid token at the position (0-based).
        num_accepted_tokens_per_pos: drafts of which the token at the position was accepted.
        num_fallbacks: rows that were not finite, or held no residual mass, and were worked around.
    """

    num_speculative_tokens: int = 0
    num_target_passes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_fallbacks: int = 0

    def __post_init__(self) -> None:
        self._list_positions(self.num_speculative_tokens)

    def observe(
        self,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_emitted_tokens: int,
        num_fallbacks: int = 0,
    ) -> None:
        """Counts one request's part in one step.

        Args:
            num_draft_tokens: valid drafts of the window; placeholders are none.
            num_accepted_tokens: drafts the rule kept. Where an end of text, a stop or the cap cut
                the step, this may still be the number before the cut: what was not emitted is not
                counted as accepted.
            num_emitted_tokens: tokens the request really emitted in this step.
            num_fallbacks: rows of its window that were worked around.
        """
        assert 0 <= num_accepted_tokens <= num_draft_tokens, "accepted more than was drafted"
        assert 0 <= num_emitted_tokens <= num_accepted_tokens + 1, (
            "emitted more than one token more"
        )
        num_accepted_tokens = min(num_accepted_tokens, num_emitted_tokens)
        self._list_positions(num_draft_tokens)
        self.num_target_passes += 1
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_emitted_tokens += num_emitted_tokens
        self.num_fallbacks += num_fallbacks
        for position in range(num_draft_tokens):
            self.num_draft_tokens_per_pos[position] += 1
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1

    def merge(self, other: SpecDecodeMetrics) -> None:
        """Adds the counts of another run."""
        self.num_speculative_tokens = max(self.num_speculative_tokens, other.num_speculative_tokens)
        self._list_positions(len(other.num_draft_tokens_per_pos))
        self.num_target_passes += other.num_target_passes
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_emitted_tokens += other.num_emitted_tokens
        self.num_fallbacks += other.num_fallbacks
        for position, count in enumerate(other.num_draft_tokens_per_pos):
            self.num_draft_tokens_per_pos[position] += count
        for position, count in enumerate(other.num_accepted_tokens_per_pos):
            self.num_accepted_tokens_per_pos[position] += count

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens per draft: tokens a drafted pass yields, the bound on the speed-up.

        The limit is K + 1. Without any draft it is 1, what a plain pass yields.
        """
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 without drafts."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Share of the drafts that had the position in which its token was accepted."""
        return [
            _ratio(accepted, drafted)
            for accepted, drafted in zip(
                self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True
            )
        ]

    @property
    def tokens_per_target_pass(self) -> float:
        """Emitted tokens per pass, passes without drafts and cut ones included; 0 before any."""
        return _ratio(self.num_emitted_tokens, self.num_target_passes)

    def to_dict(self) -> SpecDecodeStats:
        """The figures that go into the command line's JSON."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_target_pass": self.tokens_per_target_pass,
        }

    def _list_positions(self, num_positions: int) -> None:
        """Lengthens both lists to `num_positions`."""
        missing = num_positions - len(self.num_draft_tokens_per_pos)
        self.num_draft_tokens_per_pos.extend([0] * missing)
        self.num_accepted_tokens_per_pos.extend([0] * missing)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
