"""Requests that decode through the samplers of vLLM's V1 runner, over laws given as tables.

Drafts are drawn by the function that vLLM's proposers draw with, and judged by its
`RejectionSampler`; what follows is what the runner and the scheduler do with the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


@dataclass(frozen=True)
class Tables:
    """Laws of the next token given the last one.

    Attributes:
        target: [V, V] float.
        draft: [V, V] float.
    """

    target: Tensor
    draft: Tensor

    @classmethod
    def random(cls, vocab_size: int, spread: float, seed: int) -> Tables:
        generator = torch.Generator().manual_seed(seed)
        logits = spread * torch.randn(2, vocab_size, vocab_size, generator=generator)
        return cls(*logits.softmax(-1))

    def joint_law(self, first: int, length: int) -> Tensor:
        """[V, ..., V] float64: law of `length` tokens of the target after `first`."""
        law = self.target[first].double()
        for _ in range(length - 1):
            law = law.unsqueeze(-1) * self.target.double()
        return law


def sampling_metadata(
    temperatures: list[float], generators: dict[int, torch.Generator] | None = None
) -> SamplingMetadata:
    """What the runner knows of requests that set nothing but a temperature and a seed."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    num_requests = len(temperatures)
    zeros = torch.zeros(num_requests)
    return SamplingMetadata(
        temperature=torch.tensor(temperatures),
        all_greedy=not any(temperatures),
        all_random=all(temperatures),
        top_p=None,
        top_k=None,
        generators=generators or {},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros + 1,
        output_token_ids=[[] for _ in range(num_requests)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def spec_decode_metadata(drafts: list[list[int]]) -> SpecDecodeMetadata:
    """Drafts of each request; its rows of the logits stand one after another, the bonus last."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    counts = torch.tensor([len(one) for one in drafts], dtype=torch.int32)
    num_rows = int(counts.sum()) + len(drafts)
    ends = (counts + 1).cumsum(0, dtype=torch.int32)
    is_bonus = torch.zeros(num_rows, dtype=torch.bool)
    is_bonus[(ends - 1).long()] = True
    rows = torch.arange(num_rows, dtype=torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor([id for one in drafts for id in one], dtype=torch.int32),
        num_draft_tokens=counts.tolist(),
        cu_num_draft_tokens=counts.cumsum(0, dtype=torch.int32),
        cu_num_sampled_tokens=ends,
        target_logits_indices=rows[~is_bonus],
        bonus_logits_indices=rows[is_bonus],
        logits_indices=rows,
    )


def verify(
    rule: str,
    drafts: list[list[int]],
    draft_probs: Tensor | None,
    logits: Tensor,
    metadata: SamplingMetadata,
) -> Tensor:
    """[B, K + 1] what vLLM's rejection sampler emits.

    Args:
        rule: of the speculative configuration.
        drafts: of each request, T in all.
        draft_probs: [T, V] or None.
        logits: [T + B, V] of the target.
        metadata: of `sampling_metadata`.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    config = SimpleNamespace(rejection_sample_method=rule)
    sampler = RejectionSampler(Sampler(), config, torch.device("cpu"))
    output = sampler(spec_decode_metadata(drafts), draft_probs, logits, metadata)
    return output.sampled_token_ids


def decode(
    rule: str,
    tables: Tables,
    num_requests: int,
    num_drafts: int,
    length: int,
    q: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Decodes requests that all begin after token 0, in windows, until each has `length` tokens.

    Args:
        rule: of the speculative configuration.
        tables: laws of target and drafts.
        num_requests: N.
        num_drafts: of each window, K.
        length: tokens of each request that are looked at.
        q: [V, V], the draft law told to the verification; the true one by default.

    Returns:
        [N, length] token ids, and the accepted drafts of the first windows on average.
    """
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token as draw

    told = tables.draft if q is None else q
    texts = [[0] for _ in range(num_requests)]
    accepted: float | None = None
    while waiting := [text for text in texts if len(text) <= length]:
        metadata = sampling_metadata([1.0] * len(waiting))
        last = torch.tensor([text[-1] for text in waiting])
        before, drafts = [last], []
        for _ in range(num_drafts):
            token_ids, _ = draw(tables.draft[before[-1]].log(), metadata)
            drafts.append(token_ids)
            before.append(token_ids)
        contexts = torch.stack(before, 1)
        output = verify(
            rule,
            torch.stack(drafts, 1).tolist(),
            told[contexts[:, :-1]].flatten(0, 1),
            tables.target[contexts].log().flatten(0, 1),
            metadata,
        )
        if accepted is None:
            accepted = float((output >= 0).sum(1).float().mean()) - 1
        for text, tokens in zip(waiting, output.tolist(), strict=True):
            text.extend(token for token in tokens if token >= 0)
    assert accepted is not None
    return torch.tensor([text[1 : length + 1] for text in texts]), accepted
