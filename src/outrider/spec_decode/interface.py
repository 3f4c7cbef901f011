"""What drafts: the contract between the step and a proposer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.batch import DraftTokens, SampledTokens, ScheduledBatch


class Proposer(Protocol):
    """Drafts what the target may say next.

    A proposer may look at everything the request has emitted. Each draft must really be drawn
    from the law it is reported with, and none may be withdrawn because of its own value.
    """

    def propose(
        self, batch: ScheduledBatch, hidden_states: Tensor, result: SampledTokens
    ) -> DraftTokens | None:
        """Catches up on the rows that were kept, then drafts ahead.

        Called once a step, after verification, before the requests have taken up their new
        tokens: `result.output_token_ids` follow `request.token_ids`.

        Args:
            batch: what ran.
            hidden_states: [T, W] the target's streams of every row.
            result: what was emitted.

        Returns:
            Drafts aligned with the batch, or None where nobody gets any.
        """
        ...


class NoProposer:
    """Plain decoding: K = 0."""

    def propose(
        self,
        batch: ScheduledBatch,  # noqa: ARG002 - the protocol's name
        hidden_states: Tensor,  # noqa: ARG002 - the protocol's name
        result: SampledTokens,  # noqa: ARG002 - the protocol's name
    ) -> None:
        """Drafts nothing."""
        return
