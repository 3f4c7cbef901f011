"""The law of rollback for the head: what it drafts depends on the text, not on how that came about.

After any windows, with any numbers of drafts kept, the head's drafts and the laws they are drawn
from are those of a request whose prompt is the whole text, run in one piece; and these are those of
a head written row by row from the equations.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.batch import DraftTokens, RowSpan, SampledTokens, ScheduledBatch
from outrider.config import RejectionSampleMethod
from outrider.engine.engine import LLMEngine
from outrider.sampling import (
    Purpose,
    gumbel_noise,
    sample_from_probs,
    sample_with_gumbel,
    uniforms,
)
from outrider.sampling_params import SamplingParams
from tests.models.plain_head import PlainHead
from tests.tiny_engine import VOCAB_SIZE, make_engine, random_prompts, tiny_model

EXACT = 1e-12
VISIBLE = 1e-5  # of a probability; the head of the tiny model looks little at its past
PROMPT_LENGTHS = (2, 27)  # the second is past the indexer's budget, and longer than a step's rows

model = cache(tiny_model)


class ForcedSampler:
    """Keeps as many drafts as a schedule says, and goes on with a token of its own.

    Args:
        schedule: numbers of drafts to keep in the windows of a request, by request id.
    """

    def __init__(self, schedule: dict[str, Sequence[int]]) -> None:
        self._schedule = {name: list(numbers) for name, numbers in schedule.items()}

    def __call__(self, batch: ScheduledBatch, logits: Tensor) -> SampledTokens:
        kept, outputs = [], []
        for i, (request, span) in enumerate(zip(batch.requests, batch.spans, strict=True)):
            if not batch.is_sampling[i]:
                kept.append(0)
                outputs.append([])
                continue
            num_kept = 0
            if span.num_drafts:
                num_kept = min(self._schedule[request.request_id].pop(0), span.num_drafts)
            drafts = batch.drafts.token_ids[i, :num_kept].tolist() if batch.drafts else []
            kept.append(num_kept)
            outputs.append([*drafts, (7 * len(request.token_ids) + 3) % VOCAB_SIZE])
        count = len(kept)
        num_drafts = [span.num_drafts for span in batch.spans]
        none = [None] * count
        return SampledTokens(kept, outputs, [False] * count, num_drafts, [0] * count, none)


def record(engine: LLMEngine) -> list[tuple[list[list[int]], DraftTokens]]:
    """Collects the texts of the batch after each step, with what was drafted for them."""
    seen: list[tuple[list[list[int]], DraftTokens]] = []
    propose = engine.proposer.propose

    def recorded(batch: ScheduledBatch, hidden_states: Tensor, result: SampledTokens) -> Any:
        drafts = propose(batch, hidden_states, result)
        if drafts is not None:
            pairs = zip(batch.requests, result.output_token_ids, strict=True)
            seen.append(([[*request.token_ids, *new] for request, new in pairs], drafts))
        return drafts

    engine.proposer.propose = recorded  # type: ignore[method-assign]
    return seen


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=5, max_tokens=num_tokens, ignore_eos=True)


def fresh_drafts(text: list[int], k: int, *, shares_index: bool) -> DraftTokens:
    """What the head drafts after a text that ran in one piece, but for its last token."""
    engine = make_engine(model(), k, index_share_for_mtp_iteration=shares_index)
    engine.rejection_sampler = EmitLast(text[-1])
    ((texts, drafts),) = _record_one_step(engine, text[:-1])
    assert texts == [text]
    return drafts


class EmitLast:
    """Emits a given token for the one request of a batch."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def __call__(self, batch: ScheduledBatch, logits: Tensor) -> SampledTokens:
        return SampledTokens([0], [[self._token_id]], [False], [0], [0], [None])


def _record_one_step(engine: LLMEngine, prompt: list[int]) -> Any:
    seen = record(engine)
    engine.add_request("0", prompt, params(90 - len(prompt)))
    engine.step()
    return seen


def error_of_drafts(drafts: DraftTokens, index: int, fresh: DraftTokens) -> float:
    """The largest difference of a probability; infinite where the drafts themselves differ."""
    count = fresh.num_drafts[0]
    assert drafts.num_drafts[index] == count
    if not torch.equal(drafts.token_ids[index, :count], fresh.token_ids[0, :count]):
        return float("inf")
    assert drafts.probs is not None
    assert fresh.probs is not None
    return float((drafts.probs[index, :count] - fresh.probs[0, :count]).abs().max())


def largest_error(
    k: int,
    schedule: Sequence[int],
    length: int,
    *,
    shares_index: bool = False,
    mutate: Callable[[LLMEngine], None] | None = None,
) -> float:
    """Runs one request through its schedule; the largest error of any drafts on the way."""
    engine = make_engine(
        model(), k, max_num_batched_tokens=10, index_share_for_mtp_iteration=shares_index
    )
    engine.rejection_sampler = ForcedSampler({"0": schedule})
    if mutate is not None:
        mutate(engine)
    seen = record(engine)
    (prompt,) = random_prompts([length], seed=6)
    engine.add_request("0", prompt, params(90 - length))
    while len(seen) <= len(schedule):
        engine.step()
    error = 0.0
    for (text,), drafts in seen:
        fresh = fresh_drafts(text, k, shares_index=shares_index)
        assert fresh.num_drafts == [k]
        error = max(error, error_of_drafts(drafts, 0, fresh))
    return error


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
@pytest.mark.parametrize("k", range(1, 9))
def test_drafts_depend_on_the_text_alone(k: int, length: int) -> None:
    """Every number of drafts kept, growing from window to window."""
    assert largest_error(k, range(k + 1), length) < EXACT


@pytest.mark.parametrize("k", [1, 4])
def test_with_one_index_selection_for_all_draft_steps(k: int) -> None:
    assert largest_error(k, [k, 0, 1, k], 27, shares_index=True) < EXACT


@torch.no_grad()
@pytest.mark.parametrize("shares_index", [False, True])
@pytest.mark.parametrize("length", [2, 3, 12, 29])
def test_the_laws_of_drafts_are_those_of_the_equations(length: int, shares_index: bool) -> None:
    """Which streams meet which token at which position, past the indexer's budget too."""
    k = 4
    (text,) = random_prompts([length], seed=9)
    drafts = fresh_drafts(text, k, shares_index=shares_index)
    assert drafts.probs is not None
    trunk = model().model.forward_sequence(torch.tensor([text[:-1]])).streams[0]
    head, streams = PlainHead(model()), trunk[0]
    # The newest token has not run: the last row of the trunk is the one before it.
    for position, token_id in enumerate(text[1:]):
        streams = head.run(trunk[position], token_id, position)
    listed = head.attended if shares_index else None
    for depth, token_id in enumerate(drafts.token_ids[0].tolist()):
        law = head.logits(streams).softmax(-1)
        assert (drafts.probs[0, depth] - law).abs().max() < EXACT
        streams = head.run(streams, token_id, length - 1 + depth, listed=listed)


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_each_draft_is_drawn_with_the_numbers_of_its_place(rule: RejectionSampleMethod) -> None:
    """Under `coupled` the noise of the position, which the target will meet; else of the window."""
    engine = make_engine(model(), 4, rejection_sample_method=rule)
    seen = record(engine)
    prompts = random_prompts([3, 20], seed=11)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params(40), choice_index=i)
    for _ in range(4):
        engine.step()
    assert len(seen) == 4
    seeds, choices = torch.tensor([5, 5]), torch.tensor([0, 1])
    for texts, drafts in seen:
        starts = torch.tensor([len(text) for text in texts])
        assert drafts.probs is not None
        for depth in range(4):
            law, at = drafts.probs[:, depth], torch.full_like(starts, depth)
            if rule == "coupled":
                noise = gumbel_noise(seeds, choices, starts + at, VOCAB_SIZE)
                expected = sample_with_gumbel(law, noise)
            else:
                numbers = uniforms(seeds, choices, starts, at, Purpose.DRAFT)
                expected = sample_from_probs(law, numbers)
            assert torch.equal(drafts.token_ids[:, depth], expected)


def test_requests_that_keep_different_numbers() -> None:
    k, lengths = 4, (3, 9, 20, 29)
    engine = make_engine(model(), k)
    schedules = {str(i): [(i + turn) % (k + 1) for turn in range(5)] for i in range(len(lengths))}
    engine.rejection_sampler = ForcedSampler(schedules)
    seen = record(engine)
    for i, prompt in enumerate(random_prompts(lengths, seed=7)):
        engine.add_request(str(i), prompt, params(90 - len(prompt)))
    for _ in range(5):
        engine.step()
    assert len(seen) == 5
    for texts, drafts in seen:
        for i, text in enumerate(texts):
            assert error_of_drafts(drafts, i, fresh_drafts(text, k, shares_index=False)) < EXACT


# What would go wrong in the head, one thing at a time.
def feed_one_row_less(engine: LLMEngine) -> None:
    """The last draft that was kept does not reach the head."""
    proposer = engine.proposer
    catch_up = proposer._catch_up

    def late(batch: Any, hidden_states: Tensor, result: SampledTokens, *args: Any) -> Tensor:
        kept = [max(number - 1, 0) for number in result.num_accepted_tokens]
        return catch_up(batch, hidden_states, replace(result, num_accepted_tokens=kept), *args)

    proposer._catch_up = late


def change_forward(
    engine: LLMEngine, change: Callable[[int, Tensor, Tensor, list[RowSpan]], Any]
) -> None:
    proposer = engine.proposer
    forward = proposer._forward

    def changed(streams: Tensor, ids: Tensor, spans: Any, *, spec_step_idx: int, share: Any) -> Any:
        changed_inputs = change(spec_step_idx, streams, ids, list(spans))
        output = forward(*changed_inputs, spec_step_idx=spec_step_idx, share=share)
        return output.expand(streams.shape[0], -1)

    proposer._forward = changed


def keep_own_rows(engine: LLMEngine) -> None:
    """Rows of drafts that were kept stay as the head made them from its own streams."""

    def change(step: int, streams: Tensor, ids: Tensor, spans: list[RowSpan]) -> Any:
        (span,) = spans
        if step or span.start < 27:
            return streams, ids, spans
        last = RowSpan(span.row, span.start + span.num_rows - 1, 1, 0)
        return streams[-1:], ids[-1:], [last]

    change_forward(engine, change)


def stay_in_place(engine: LLMEngine) -> None:
    """Draft steps overwrite each other at one position."""

    def change(step: int, streams: Tensor, ids: Tensor, spans: list[RowSpan]) -> Any:
        back = max(step - 1, 0)
        return streams, ids, [replace(span, start=span.start - back) for span in spans]

    change_forward(engine, change)


def write_behind(engine: LLMEngine) -> None:
    """Kept rows are written after the refused ones instead of over them."""
    manager = engine.cache_manager
    plan, longest = manager.plan, [0]

    def shifted(spans: list[RowSpan], names: Any, *args: Any, **options: Any) -> Any:
        if "mtp_attention" in names:
            (span,) = spans
            start = longest[0] if span.num_rows > 1 or longest[0] > span.start else span.start
            longest[0] = max(longest[0], start + span.num_rows)
            spans = [replace(span, start=start)]
        return plan(spans, names, *args, **options)

    manager.plan = shifted  # type: ignore[method-assign]


def pair_with_the_same_token(engine: LLMEngine) -> None:
    """Streams meet the token of their own position instead of the next one."""

    def change(step: int, streams: Tensor, ids: Tensor, spans: list[RowSpan]) -> Any:
        return streams, ids if step else ids.roll(1), spans

    change_forward(engine, change)


MUTATIONS = (
    feed_one_row_less,
    keep_own_rows,
    stay_in_place,
    write_behind,
    pair_with_the_same_token,
)


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_the_law_notices(mutate: Callable[[LLMEngine], None]) -> None:
    assert largest_error(4, [2, 4, 1], 27, mutate=mutate) > VISIBLE
