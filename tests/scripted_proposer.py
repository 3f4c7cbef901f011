"""Proposers that draft by a script: from the text a request is known to become, or against it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID, DraftTokens, SampledTokens, ScheduledBatch
from outrider.spec_decode.draft_length import draft_length

Script = Callable[[list[int], int], list[int]]
"""Takes prompt and output so far, and K; returns at most K ids."""


@dataclass
class ScriptedProposer:
    """One-hot drafts by a script for each request.

    Attributes:
        scripts: by request id; a request without one gets no drafts.
        k: drafts at most.
        is_clipped: leaves off what the cap of the request makes useless, as the head does.
    """

    scripts: dict[str, Script]
    k: int
    is_clipped: bool = True

    def propose(
        self, batch: ScheduledBatch, hidden_states: Tensor, result: SampledTokens
    ) -> DraftTokens | None:
        rows: list[list[int]] = []
        for i, request in enumerate(batch.requests):
            script = self.scripts.get(request.request_id)
            if script is None or not batch.is_sampling[i] or result.is_broken[i]:
                rows.append([])
                continue
            new = result.output_token_ids[i]
            length = draft_length(request, len(new), self.k) if self.is_clipped else self.k
            rows.append(script([*request.token_ids, *new], length)[:length])
        return drafts_of(rows)


def drafts_of(rows: Sequence[Sequence[int]]) -> DraftTokens | None:
    """One-hot drafts, a row a request, of any lengths."""
    width = max(map(len, rows), default=0)
    if not width:
        return None
    padded = [[*row, *[PLACEHOLDER_TOKEN_ID] * (width - len(row))] for row in rows]
    return DraftTokens(torch.tensor(padded), None, [len(row) for row in rows])


@dataclass(frozen=True)
class Drafter:
    """Scripts that know what a request becomes.

    Attributes:
        reference: prompt and output of plain decoding.
        vocab_size: V.
    """

    reference: Sequence[int]
    vocab_size: int

    def perfect(self, text: list[int], k: int) -> list[int]:
        """What the target is going to say."""
        return list(self.reference[len(text) : len(text) + k])

    def adversarial(self, text: list[int], k: int) -> list[int]:
        """Never what the target is going to say."""
        return [self._wrong(token_id) for token_id in self.perfect(text, k)]

    def random(self, text: list[int], k: int) -> list[int]:
        """Any ids, the same ones for the same length of text."""
        ids = random.Random(len(text))
        return [ids.randrange(self.vocab_size) for _ in range(k)]

    def one_error(self, place: int) -> Script:
        """Perfect but for one place, counted from 1."""

        def script(text: list[int], k: int) -> list[int]:
            drafts = self.perfect(text, k)
            if place <= len(drafts):
                drafts[place - 1] = self._wrong(drafts[place - 1])
            return drafts

        return script

    def moving_error(self, text: list[int], k: int) -> list[int]:
        """Perfect but for one place, another one in every window."""
        return self.one_error(1 + len(text) % max(k, 1))(text, k)

    def placeholders(self, text: list[int], k: int) -> list[int]:
        """Perfect but for one place at which nothing was drawn, another one in every window."""
        drafts = self.perfect(text, k)
        place = len(text) % (len(drafts) + 1)
        return [*drafts[:place], PLACEHOLDER_TOKEN_ID, *drafts[place + 1 :]][: len(drafts)]

    def _wrong(self, token_id: int) -> int:
        return (token_id + 1) % self.vocab_size
