"""Turns the parameters of a batch's requests into tensors for drafting and verification."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.sampling import (
    LogitsProcessors,
    SamplingTensors,
    TextSoFar,
    process_logits,
    uses_processors,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.config import LogprobsMode, RejectionSampleMethod
    from outrider.request import Request
    from outrider.sampling import RowProcessors


@dataclass(frozen=True)
class SamplingDefaults:
    """What holds for every request of an engine.

    Attributes:
        rejection_sample_method: rule of requests that name none.
        vocab_size: V.
        num_allowed_tokens: ids from here on are padding of the vocabulary: never drawn.
        device: of the tensors.
        logprobs_mode: of which law the log probabilities are that a request asks for.
        missing_ids: ids below `num_allowed_tokens` that are never drawn either.
    """

    rejection_sample_method: RejectionSampleMethod
    vocab_size: int
    num_allowed_tokens: int
    device: torch.device
    logprobs_mode: LogprobsMode = "raw_logprobs"
    missing_ids: frozenset[int] = frozenset()

    @cached_property
    def allowed_mask(self) -> Tensor | None:
        """[V] bool, or None where every id may be drawn."""
        if self.num_allowed_tokens >= self.vocab_size and not self.missing_ids:
            return None
        mask = torch.arange(self.vocab_size, device=self.device) < self.num_allowed_tokens
        mask[sorted(self.missing_ids)] = False
        return mask

    @cached_property
    def known_ids(self) -> Tensor | None:
        """[A] int64, the ids that may be drawn, ascending; None where that is every id."""
        mask = self.allowed_mask
        return None if mask is None else mask.nonzero().squeeze(-1)

    def rule(self, request: Request) -> RejectionSampleMethod:
        """The rule a request is verified with."""
        return request.params.rejection_sample_method or self.rejection_sample_method


@dataclass(frozen=True)
class RequestSampling:
    """Parameters and random keys of B requests.

    Attributes:
        params: of the B rows.
        processors: with what the requests have said, or None where none uses any.
        seeds: [B] int64.
        choices: [B] int64.
        is_greedy: every request takes the argmax.
    """

    params: SamplingTensors
    processors: LogitsProcessors | None
    seeds: Tensor
    choices: Tensor
    is_greedy: bool

    @classmethod
    def from_requests(
        cls,
        requests: Sequence[Request],
        defaults: SamplingDefaults,
        new_token_ids: Sequence[Sequence[int]] | None = None,
    ) -> RequestSampling:
        """Gathers the requests' own numbers.

        Args:
            requests: B of them.
            defaults: vocabulary and device.
            new_token_ids: what each has emitted and not taken up yet, None for nothing.
        """
        params = [request.params for request in requests]
        device = defaults.device
        return cls(
            params=SamplingTensors.from_values(
                [p.temperature for p in params],
                [p.top_k for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                device=device,
                allowed_mask=defaults.allowed_mask,
            ),
            processors=gather_processors(requests, new_token_ids, defaults.vocab_size, device),
            seeds=torch.tensor([request.seed for request in requests], device=device),
            choices=torch.tensor([request.choice for request in requests], device=device),
            is_greedy=all(p.is_greedy for p in params),
        )

    def row_processors(
        self, owners: Sequence[int], depths: Sequence[int], draft_ids: Tensor
    ) -> RowProcessors | None:
        """What is done to N rows of logits (`LogitsProcessors.rows`), None if nothing."""
        return None if self.processors is None else self.processors.rows(owners, depths, draft_ids)


def gather_processors(
    requests: Sequence[Request],
    new_token_ids: Sequence[Sequence[int]] | None,
    vocab_size: int,
    device: torch.device,
) -> LogitsProcessors | None:
    """What the requests do to logits, or None where none uses a processor.

    Args:
        requests: B of them.
        new_token_ids: what each has emitted and not taken up yet, None for nothing.
        vocab_size: V.
        device: of the tensors.
    """
    new = new_token_ids or [()] * len(requests)
    texts = [_text_so_far(request, ids) for request, ids in zip(requests, new, strict=True)]
    return LogitsProcessors.of(texts, vocab_size, device)


def _text_so_far(request: Request, new_token_ids: Sequence[int]) -> TextSoFar | None:
    """What processors and a grammar look at, or None where the next window uses none."""
    params, bad_words = request.params, request.bad_words_token_ids
    num_output_tokens = request.num_output_tokens + len(new_token_ids)
    if request.grammar is None and not uses_processors(params, bad_words, num_output_tokens):
        return None
    return TextSoFar(
        params,
        request.distinct_prompt_ids,
        [*request.output_token_ids, *new_token_ids],
        request.stop_token_ids,
        bad_words,
        request.grammar,
        request.num_output_tokens,
    )


def greedy_token_ids(
    logits: Tensor, allowed_mask: Tensor | None, processors: RowProcessors | None
) -> Tensor:
    """Argmax of each row after mask and processors, [N, V] to [N].

    -1 where the row has no finite maximum or holds NaN.
    """
    peak, token_ids = process_logits(logits, allowed_mask, processors).max(-1)
    return torch.where(torch.isfinite(peak), token_ids, -1)
