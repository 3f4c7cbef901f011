"""The engine over its caches: each group has tables of its own, and nothing passes on to others.

What a request leaves in its blocks and slots, NaN included, is never seen by another.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.cache import cache_manager
from outrider.cache.groups import CacheGroup
from outrider.engine.engine import LLMEngine
from outrider.models.qwen4_exp.cache_specs import MTP_GROUPS, TARGET_ATTENTION, TARGET_INDEX
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from tests.models.feeder import Feeder, Piece
from tests.scripted_proposer import Drafter, Script, ScriptedProposer
from tests.tiny_engine import (
    VOCAB_SIZE,
    Decoded,
    Job,
    decode,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    step,
    tiny_model,
)

K, MAX_TOKENS = 3, 20
LENGTHS = (1, 6, 11, 19, 26, 30)
BAD_ID = VOCAB_SIZE - 1  # its embedding is NaN in `model_with_a_bad_id`

model = cache(tiny_model)


@cache
def prompts() -> list[list[int]]:
    return [[token % BAD_ID for token in prompt] for prompt in random_prompts(LENGTHS, seed=4)]


def jobs() -> list[Job]:
    return [Job(prompt, greedy(MAX_TOKENS), arrival=i) for i, prompt in enumerate(prompts())]


@cache
def expected() -> list[list[int]]:
    return [decode_alone(model(), job).token_ids for job in jobs()]


def token_ids(results: list[Decoded]) -> list[list[int]]:
    return [result.token_ids for result in results]


def record_head_logits(engine: LLMEngine) -> list[Tensor]:
    """Collects what every draft of the head is drawn from."""
    sampler, seen = engine.proposer._sampler, []
    draw = sampler.draw

    def recorded(logits: Tensor, *args: Any) -> Any:
        seen.append(logits.clone())
        return draw(logits, *args)

    sampler.draw = recorded
    return seen


def shuffle_tables(engine: LLMEngine, seed: int) -> None:
    """Another order of blocks and of state slots in every group."""
    shuffle = random.Random(seed).shuffle
    manager = engine.cache_manager
    for table in manager.block_tables.values():
        shuffle(table.pool._free)
    for pool in manager.state_pools.values():
        shuffle(pool._free)


@pytest.mark.parametrize("seed", range(3))
def test_groups_with_different_tables(seed: int) -> None:
    """The same texts, and the same drafts bit for bit: the head has caches of its own too."""
    together = [Job(job.prompt, job.params) for job in jobs()]
    plain = make_engine(model(), K)
    expected_logits = record_head_logits(plain)
    decode(plain, together)
    engine = make_engine(model(), K)
    shuffle_tables(engine, seed)
    logits = record_head_logits(engine)
    for i, job in enumerate(together):
        engine.add_request(str(i), job.prompt, job.params)
    results = {str(i): Decoded() for i in range(len(together))}
    step(engine, results)
    tables, pools = engine.cache_manager.block_tables, engine.cache_manager.state_pools
    for row in range(1, len(together)):  # of one block alone, chance may give two groups the same
        held = {tuple(table.blocks(row)) for table in tables.values()}
        assert len(held) == len(tables) == 4, "two groups have the same table"
    slots = {tuple(pool.slots(np.arange(6)).tolist()) for pool in pools.values()}
    assert len(slots) == len(pools) == 2
    while engine.has_unfinished_requests():
        step(engine, results)
    assert token_ids(list(results.values())) == expected()
    assert all(torch.equal(a, b) for a, b in zip(logits, expected_logits, strict=True))


@pytest.mark.parametrize("groups", [(TARGET_ATTENTION, TARGET_INDEX), MTP_GROUPS])
def test_a_table_of_another_group_is_wrong(groups: tuple[str, str]) -> None:
    """The test above would notice: blocks read with the other group's table change what is said."""
    engines = [make_engine(model(), K) for _ in range(2)]
    logits = []
    for engine, is_swapped in zip(engines, (False, True), strict=True):
        shuffle_tables(engine, 0)
        logits.append(record_head_logits(engine))
        engine.add_request("0", prompts()[4], greedy(MAX_TOKENS))
        engine.step()
        if is_swapped:
            tables = engine.cache_manager.block_tables
            tables[groups[0]], tables[groups[1]] = tables[groups[1]], tables[groups[0]]
        engine.step()
    first_step = K
    for a, b in zip(*(seen[:first_step] for seen in logits), strict=True):
        assert torch.equal(a, b)
    differences = [
        float((a - b).abs().max())
        for a, b in zip(*(seen[first_step:] for seen in logits), strict=True)
    ]
    assert min(differences) > 1e-6


def strided_table(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same numbers in a view that skips every second row and column."""
    wide = np.full([2 * n for n in array.shape], -(1 << 40), dtype=array.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in array.shape)]
    view[:] = array
    assert not view.flags.c_contiguous
    return view


class StridedGroup(CacheGroup):
    """Layers lie side by side within a slot, as rows of a wider tensor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name, tensor in self.tensors.items():
            swapped = torch.full(
                (tensor.shape[1], 2 * tensor.shape[0], *tensor.shape[2:]), torch.nan
            )
            view = swapped.to(tensor.dtype)[:, ::2].transpose(0, 1)
            view.copy_(tensor)
            assert not tensor.numel() or not view[0].is_contiguous()
            self.tensors[name] = view


@pytest.mark.parametrize("k", [0, K])
def test_tables_and_states_may_be_strided(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts prefilled in one step, then decoded, through views that are not contiguous."""
    monkeypatch.setattr(cache_manager, "CacheGroup", StridedGroup)
    engine = make_engine(model(), k)
    manager = engine.cache_manager
    for table in manager.block_tables.values():
        table._blocks = strided_table(table._blocks)
    for pool in manager.state_pools.values():
        pool._slots = strided_table(pool._slots)
    manager._num_kept = strided_table(manager._num_kept)
    together = [Job(job.prompt, job.params) for job in jobs()]
    assert token_ids(decode(engine, together)) == expected()


def fill_free_memory(engine: LLMEngine, value: Callable[[Tensor], Tensor]) -> None:
    """Overwrites all blocks but the null one, and all state slots; nothing may be running."""
    assert not engine.has_unfinished_requests()
    for group in engine.cache_manager.groups.values():
        for spec in group.spec.tensors:
            tensor = group.tensors[spec.name]
            first = engine.cache_manager.block_size // spec.tokens_per_slot
            held = tensor[:, first:] if group.spec.is_paged else tensor
            held.copy_(value(held))


@pytest.mark.parametrize("order", [range(6), range(5, -1, -1), (4, 4, 0, 5, 1)])
def test_blocks_that_come_back(order: Any) -> None:
    """Room for one request at a time: each gets what the one before it left."""
    bytes_per_block = make_engine(model(), K).cache_plan.bytes_per_block
    engine = make_engine(model(), K, kv_cache_memory=bytes_per_block * 7, max_num_seqs=1)
    assert engine.cache_manager.can_allocate(7 * 8)
    assert not engine.cache_manager.can_allocate(7 * 8 + 1)
    results = decode(engine, [Job(prompts()[i], greedy(MAX_TOKENS)) for i in order])
    assert token_ids(results) == [expected()[i] for i in order]
    alone = [
        decode(make_engine(model(), K), [Job(prompts()[i], greedy(MAX_TOKENS))]) for i in order
    ]
    assert [r.windows for r in results] == [windows.windows for (windows,) in alone]


def test_what_lies_in_free_memory_is_not_seen() -> None:
    engine = make_engine(model(), K)
    fill_free_memory(engine, lambda held: torch.randn_like(held) * 100)
    results = decode(engine, jobs())
    assert token_ids(results) == expected()
    assert [r.windows for r in results] == [
        r.windows for r in decode(make_engine(model(), K), jobs())
    ]


@cache
def model_with_a_bad_id() -> Qwen4ExpForCausalLM:
    """The same model, but that one id has no finite embedding; no text above holds it."""
    other = tiny_model()
    with torch.no_grad():
        other.model.embed_tokens.weight[BAD_ID] = torch.nan
    return other


def bad_job(length: int, arrival: int = 0) -> Job:
    prompt = prompts()[-1][: length - 1]
    return Job([*prompt, BAD_ID], greedy(MAX_TOKENS), arrival)


def assert_finite(engine: LLMEngine) -> None:
    """No free block holds NaN; state slots are cleared when they are given out.

    What is remembered may: it is given only to who begins with the same tokens, and cleared then.
    """
    engine.reset_prefix_cache()
    for name in engine.cache_manager.block_tables:
        group = engine.cache_manager.groups[name]
        for spec in group.spec.tensors:
            first = engine.cache_manager.block_size // spec.tokens_per_slot
            assert group.tensors[spec.name][:, first:].isfinite().all(), (name, spec.name)


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("length", [1, 3, 17, 25])
def test_a_broken_request_among_others(length: int, k: int) -> None:
    """It ends with an error; the others say what they say alone, and so does who comes next."""
    assert BAD_ID not in {token for text in (*prompts(), *expected()) for token in text}
    engine = make_engine(model_with_a_bad_id(), k, max_num_seqs=4)
    batch = [*jobs(), bad_job(length, arrival=1), bad_job(length, arrival=4)]
    results = decode(engine, batch)
    for broken in results[-2:]:
        assert (broken.token_ids, broken.finish_reason) == ([], "error")
        assert broken.windows == [(0, 0, 0)]
    assert token_ids(results[:-2]) == expected()
    assert all(result.finish_reason == "length" for result in results[:-2])
    assert_finite(engine)
    assert token_ids(decode(engine, jobs())) == expected()


@pytest.mark.parametrize("place", range(1, K + 1))
def test_a_draft_that_breaks_the_trunk_breaks_no_row_before_it(place: int) -> None:
    """It runs in the window of the rows that decide whether it stays, and in none after them."""
    engine = make_engine(model_with_a_bad_id(), K, max_num_seqs=4)

    def with_a_bad_id(perfect: Script) -> Script:
        return lambda text, k: [
            BAD_ID if number == place else one for number, one in enumerate(perfect(text, k), 1)
        ]

    engine.proposer = ScriptedProposer(
        {
            str(i): with_a_bad_id(Drafter([*prompt, *output], VOCAB_SIZE).perfect)
            for i, (prompt, output) in enumerate(zip(prompts(), expected(), strict=True))
        },
        K,
    )
    results = decode(engine, jobs())
    assert token_ids(results) == expected()
    assert all(result.finish_reason == "length" for result in results)
    accepted = {num_accepted for r in results for drafts, num_accepted, _ in r.windows if drafts}
    assert max(accepted) == place - 1
    assert engine.metrics.num_fallbacks == 0
    assert_finite(engine)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_broken_request_that_is_aborted_before_it_is_noticed(num_steps: int) -> None:
    """Its prompt runs in pieces; nobody has looked at a logit of it yet."""
    engine = make_engine(model_with_a_bad_id(), K, max_num_batched_tokens=8, max_num_seqs=2)
    engine.add_request("bad", [BAD_ID] * 30, greedy(MAX_TOKENS))
    for _ in range(num_steps):
        assert engine.step() == []
    engine.abort_request("bad")
    assert_finite(engine)
    assert token_ids(decode(engine, jobs())) == expected()


def test_a_head_that_breaks_for_one_request() -> None:
    """It costs that request its drafts, others nothing, and who gets its blocks nothing."""
    reference = decode(make_engine(model(), K), jobs())
    engine = make_engine(model(), K, max_num_seqs=6)
    propose, bad = engine.proposer.propose, {"2"}

    def broken_propose(batch: Any, hidden_states: Tensor, result: Any) -> Any:
        first = 0
        for request, span in zip(batch.requests, batch.spans, strict=True):
            if request.request_id in bad:
                hidden_states[first : first + span.num_rows] = torch.nan
            first += span.num_rows
        return propose(batch, hidden_states, result)

    engine.proposer.propose = broken_propose  # type: ignore[method-assign]
    results = decode(engine, jobs())
    assert token_ids(results) == expected()
    for i, (result, plain) in enumerate(zip(results, reference, strict=True)):
        assert (result.windows == plain.windows) == (str(i) not in bad)
    bad.clear()
    again = decode(engine, jobs())
    assert [r.windows for r in again] == [r.windows for r in reference]


def test_a_broken_head_is_the_head_of_its_request_alone() -> None:
    """Who comes in while its drafts wait has no drafts, and the first row of theirs is not its."""
    engine = make_engine(model(), K)
    propose = engine.proposer.propose

    def broken_propose(batch: Any, hidden_states: Tensor, result: Any) -> Any:
        assert batch.requests[0].request_id == "broken"
        hidden_states[: batch.spans[0].num_rows] = torch.nan
        return propose(batch, hidden_states, result)

    engine.proposer.propose = broken_propose  # type: ignore[method-assign]
    engine.add_request("broken", prompts()[3], greedy(MAX_TOKENS))
    engine.step()
    engine.add_request("sound", prompts()[4], greedy(MAX_TOKENS))
    engine.step()
    requests = engine.scheduler._requests
    assert not requests["broken"].has_sound_head
    assert requests["sound"].has_sound_head


def test_a_broken_piece_spreads_to_no_row_of_its_pass() -> None:
    """Logits of others in the very pass in which one request turns to NaN, bit for bit."""
    texts = [[*prompt, *output] for prompt, output in zip(prompts(), expected(), strict=True)]
    spoilt = [BAD_ID, *texts[5][1:]]
    for last in (texts[5], spoilt):
        feeder = Feeder(model_with_a_bad_id(), [texts[3], texts[4], last], num_pending_rows=3)
        feeder.run([Piece(0, 15), Piece(1, 20)])
        shared = feeder.run([Piece(0, 1, (1, 2), 0), Piece(2, 3), Piece(1, 1, (4,), 0)])
        alone = feeder.run([Piece(2, 9), Piece(0, 1), Piece(1, 2)])
        if last is texts[5]:
            sound = [shared[0], shared[2], alone[1], alone[2]]
        else:
            assert shared[1].isnan().any()
            for got, wanted in zip([shared[0], shared[2], alone[1], alone[2]], sound, strict=True):
                assert torch.equal(got, wanted)
