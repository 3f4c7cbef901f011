"""The engine's own step over a target and a head that are tables, for laws over millions of texts.

Step, scheduler, cache manager, rejection sampler, draft sampler, draft length and random streams
are the engine's. Only the two models are replaced: their logits are looked up by the last two
tokens.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID, DraftTokens, SampledTokens, ScheduledBatch
from outrider.cache.cache_manager import CacheManager
from outrider.cache.groups import GroupSpec, Rollback, TensorSpec
from outrider.config import DraftSampleMethod, RejectionSampleMethod
from outrider.engine.engine import EngineCore
from outrider.engine.model_runner import TargetOutput
from outrider.engine.scheduler import Scheduler
from outrider.request import Request
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.draft_length import draft_length
from outrider.spec_decode.draft_sampler import DraftSampler
from outrider.spec_decode.rejection_sampler import RejectionSampler
from outrider.spec_decode.request_sampling import SamplingDefaults
from outrider.stop_checker import StopChecker

VOCAB_SIZE = 3
PROMPT = (0, 1)
CHUNK_SIZE = 1 << 16
PLACE = TensorSpec("place", (1,), Rollback.TRUNCATE)
DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Tables:
    """Logits of a target and of a head after each pair of tokens.

    Attributes:
        target: [V * V, V], rows in the order of the pairs.
        draft: [V * V, V].
    """

    target: Tensor
    draft: Tensor

    @property
    def vocab_size(self) -> int:
        return self.target.shape[1]

    def contexts(self, texts: list[list[int]]) -> Tensor:
        """[b] rows of the tables after each text of two tokens or more."""
        rows = [text[-2] * self.vocab_size + text[-1] for text in texts]
        return torch.tensor(rows, dtype=torch.int64)

    def advance(self, contexts: Tensor, token_ids: Tensor) -> Tensor:
        """[b] rows after one more token each."""
        return (contexts * self.vocab_size + token_ids) % len(self.target)


def random_tables(
    seed: int,
    *,
    agreement: float,
    spread: float,
    is_sparse: bool,
    vocab_size: int = VOCAB_SIZE,
) -> Tables:
    """A target, and a head that says `agreement` of what the target says and something else.

    Sparse ones lack the least likely id: the target after each pair of tokens, so that texts of 18
    tokens can be enumerated, the head in every other row, and not always the same id.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = vocab_size**2, vocab_size
    target = 1.2 * torch.randn(shape, generator=generator)
    draft = agreement * target + spread * torch.randn(shape, generator=generator)
    if is_sparse:
        target.scatter_(-1, target.argmin(-1, keepdim=True), -torch.inf)
        draft[::2].scatter_(-1, draft[::2].argmin(-1, keepdim=True), -torch.inf)
    return Tables(target, draft)


class TableRunner:
    """Stands for the ModelRunner."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def verify(self, batch: ScheduledBatch) -> TargetOutput:
        sampling = [i for i, is_sampling in enumerate(batch.is_sampling) if is_sampling]
        texts = [batch.requests[i].token_ids for i in sampling]
        spans = [batch.spans[i] for i in sampling]
        assert all(
            span.start + span.num_certain_rows == len(text)
            for span, text in zip(spans, texts, strict=True)
        ), "the rows of a request that samples end at its last token"
        contexts = self._tables.contexts(texts)
        num_drafts = torch.tensor([span.num_drafts for span in spans], dtype=torch.int64)
        rows = [contexts]
        for depth in range(int(num_drafts.max()) if sampling else 0):
            assert batch.drafts is not None, "a span with drafts comes with them"
            drafts = batch.drafts.token_ids[sampling, depth]
            contexts = self._tables.advance(contexts, drafts.clamp(min=0))
            rows.append(contexts)
        is_row = torch.arange(len(rows)) <= num_drafts.unsqueeze(-1)
        logits = self._tables.target[torch.stack(rows, -1)[is_row]]
        return TargetOutput(logits, hidden_states=torch.empty(0))


class TableHead:
    """Stands for the MTPProposer: draws with the engine's DraftSampler."""

    def __init__(
        self,
        tables: Tables,
        defaults: SamplingDefaults,
        num_speculative_tokens: int,
        draft_sample_method: DraftSampleMethod,
    ) -> None:
        self._tables = tables
        self._num_speculative_tokens = num_speculative_tokens
        self._sampler = DraftSampler(defaults, draft_sample_method)

    def propose(
        self, batch: ScheduledBatch, hidden_states: Tensor, result: SampledTokens
    ) -> DraftTokens | None:
        outputs = result.output_token_ids
        lengths = [
            draft_length(request, len(output), self._num_speculative_tokens) if output else 0
            for request, output in zip(batch.requests, outputs, strict=True)
        ]
        members = [i for i, length in enumerate(lengths) if length]
        if not members:
            return None
        requests = [batch.requests[i] for i in members]
        contexts = self._tables.contexts(
            [batch.requests[i].token_ids[-2:] + list(outputs[i]) for i in members]
        )
        sampling = self._sampler.start(requests, [outputs[i] for i in members])
        member, length = torch.tensor(members), torch.tensor(lengths)[members]
        shape = len(lengths), max(lengths)
        token_ids, probs = torch.full(shape, PLACEHOLDER_TOKEN_ID), None
        for depth in range(shape[1]):
            active = (length > depth).nonzero().squeeze(-1)
            logits = self._tables.draft[contexts[active]]
            drawn, law = self._sampler.draw(logits, sampling, active.tolist(), depth)
            token_ids[member[active], depth] = drawn
            contexts[active] = self._tables.advance(contexts[active], drawn)
            if law is not None:
                probs = law.new_zeros(*shape, law.shape[-1]) if probs is None else probs
                probs[member[active], depth] = law
        return DraftTokens(token_ids, probs, lengths)


class TableEngine(EngineCore):
    """The step over tables.

    Args:
        tables: both models.
        rule: of requests that name none.
        num_speculative_tokens: K.
        draft_sample_method: "probabilistic" or "greedy".
        max_num_seqs: requests in a batch; those that end give way to waiting ones.
        max_num_batched_tokens: rows of a step.
        num_blocks: of two positions each, in a paged group that nothing is written to; with None
            requests need no blocks.
    """

    def __init__(
        self,
        tables: Tables,
        rule: RejectionSampleMethod,
        num_speculative_tokens: int,
        *,
        draft_sample_method: DraftSampleMethod = "probabilistic",
        max_num_seqs: int = 4096,
        max_num_batched_tokens: int = 1 << 20,
        num_blocks: int | None = None,
    ) -> None:
        vocab_size = tables.vocab_size
        defaults = SamplingDefaults(rule, vocab_size, vocab_size, DEVICE)
        cache_manager = CacheManager(
            [] if num_blocks is None else [GroupSpec("places", True, 1, (PLACE,))],
            block_size=2,
            num_blocks=num_blocks or 0,
            max_num_seqs=max_num_seqs,
            max_model_len=32,
            num_pending_rows=num_speculative_tokens,
            dtype=torch.float32,
            device=DEVICE,
        )
        scheduler = Scheduler(
            cache_manager,
            max_num_batched_tokens=max_num_batched_tokens,
            num_speculative_tokens=num_speculative_tokens,
        )
        super().__init__(
            scheduler,
            TableRunner(tables),
            RejectionSampler(defaults),
            cache_manager,
            TableHead(tables, defaults, num_speculative_tokens, draft_sample_method),
        )

    def sample_texts(self, params: SamplingParams, num_texts: int) -> Tensor:
        """[N, M] int8: texts of M tokens, of the seeds 0, 1, 2, ..."""
        parts = []
        for first in range(0, num_texts, CHUNK_SIZE):
            seeds = range(first, min(first + CHUNK_SIZE, num_texts))
            texts = self.texts([make_request(seed, params) for seed in seeds])
            parts.append(torch.tensor(texts, dtype=torch.int8))
        return torch.cat(parts)

    def texts(self, requests: Sequence[Request]) -> list[list[int]]:
        """What each request emits, step by step, until all have ended."""
        texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.scheduler.add(request)
        with collector_at_rest():
            while self.scheduler.has_unfinished_requests:
                for output in self.step():
                    texts[output.request_id] += output.new_token_ids
        return list(texts.values())


def make_request(
    seed: int,
    params: SamplingParams,
    *,
    choice: int = 0,
    prompt: Sequence[int] = PROMPT,
    bad_words: Sequence[Sequence[int]] = (),
) -> Request:
    """A request of its own seed; `params.seed` is not read."""
    assert params.max_tokens is not None, "the tables have no maximum length"
    stop_token_ids = frozenset(params.stop_token_ids or ())
    return Request(
        request_id=f"{seed}-{choice}",
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        params=params,
        max_output_tokens=params.max_tokens,
        stop_checker=StopChecker(params, stop_token_ids, params.max_tokens, None),
        seed=seed,
        choice=choice,
        bad_words_token_ids=bad_words,
    )


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Without passes of the cycle collector: a third of the time, and no object is in a cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
