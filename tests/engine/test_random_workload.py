"""Hundreds of random requests beside one another: each says what it says alone, and none leaks.

What each says alone is plain decoding without drafts. It is computed for many at once, with memory
for all, and some are really run alone.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from outrider.engine.engine import LLMEngine
from tests.engine.random_workload import MAX_K, TOKENIZER, Said, Visit, Workload, random_visits
from tests.tiny_engine import VOCAB_SIZE, make_engine, tiny_model

NUM_VISITS, NUM_ALONE = 220, 17
BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 4, 17, 8

model = cache(tiny_model)


def make(k: int, **options: Any) -> LLMEngine:
    defaults = {"block_size": BLOCK_SIZE, "max_model_len": 64}
    return make_engine(model(), k, TOKENIZER, **{**defaults, **options})


def plainly(visits: Sequence[Visit], max_num_seqs: int) -> list[Said]:
    """What requests say for which nothing is drafted, and of which none leaves."""
    stay = [
        Visit(v.prompt, replace(v.params, num_speculative_tokens=None), 0, None, False)
        for v in visits
    ]
    workload = Workload(make(0, max_num_seqs=max_num_seqs), stay)
    workload.run()
    return workload.said


def free_resources(engine: LLMEngine) -> list[int]:
    manager = engine.cache_manager
    blocks = [table.pool.num_free for table in manager.block_tables.values()]
    return [manager.num_free_rows, *blocks, *(len(p._free) for p in manager.state_pools.values())]


# Where a prompt runs token by token, what gives way all the time gets nowhere.
@pytest.mark.parametrize(
    ("threshold", "budget", "disturbance"), [(1, 64, 0.02), (7, 40, 0.1), (64, 64, 0.1)]
)
def test_everybody_says_what_it_says_alone(threshold: int, budget: int, disturbance: float) -> None:
    visits = random_visits(NUM_VISITS, seed=threshold)
    engine = make(
        MAX_K,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_memory=NUM_BLOCKS * make(MAX_K).cache_plan.bytes_per_block,
        long_prefill_token_threshold=threshold,
        max_num_batched_tokens=budget,
    )
    everything = free_resources(engine)
    workload = Workload(engine, visits, disturbance)
    workload.run()
    # Nothing is left of anybody.
    assert free_resources(engine) == everything
    scheduler = engine.scheduler
    assert [*scheduler._requests, *scheduler._running, *scheduler._waiting] == []
    assert scheduler._drafts is None
    assert engine.metrics.num_emitted_tokens == sum(len(said.token_ids) for said in workload.said)
    # All that was to happen has happened.
    assert scheduler.num_preemptions >= 40
    assert len(workload.left) >= 10
    reasons = Counter(said.finish_reason for said in workload.said)
    assert reasons["length"] > reasons["stop"] >= 10
    assert reasons[None] == len(workload.left)
    assert 0.1 < engine.metrics.acceptance_rate < 0.9

    compared, expected = assert_same(workload)
    assert len(compared) >= 170
    for place in random.Random(threshold).sample(range(len(compared)), NUM_ALONE):
        assert plainly([visits[compared[place]]], max_num_seqs=1) == [expected[place]]


def test_drafts_that_are_looked_up() -> None:
    """The other proposer, which keeps a text of its own for each request."""
    engine = make(
        MAX_K,
        method="ngram",
        prompt_lookup_min=1,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_memory=NUM_BLOCKS * make(0).cache_plan.bytes_per_block,
    )
    workload = Workload(engine, random_visits(80, seed=2), disturbance=0.1)
    workload.run()
    assert engine.scheduler.num_preemptions >= 10
    assert engine.metrics.num_accepted_tokens >= 10
    assert_same(workload)


def test_prompts_that_begin_alike() -> None:
    """Beginnings of three texts, with ends of their own: blocks and states go from hand to hand."""
    plan = make(MAX_K).cache_plan
    engine = make(
        MAX_K,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_memory=NUM_BLOCKS * plan.bytes_per_block,
        prefix_cache_memory=12 * plan.bytes_per_snapshot,
        max_num_batched_tokens=40,
    )
    rng = random.Random(4)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    visits = [
        replace(visit, prompt=[*rng.choice(texts)[: rng.randrange(25)], *visit.prompt[:4]])
        for visit in random_visits(70, seed=11)
    ]
    workload = Workload(engine, visits, disturbance=0.05)
    workload.run()
    sharing = engine.scheduler.prefix
    assert sharing is not None
    assert 0.1 < sharing.num_hit_tokens / sharing.num_queried_tokens < 0.9
    assert engine.scheduler.num_preemptions >= 5
    compared, _ = assert_same(workload)
    assert len(compared) >= 50


def assert_same(workload: Workload) -> tuple[list[int], list[Said]]:
    """Who says the same under any circumstances has said it, or as much of it as was asked for.

    Returns:
        The requests that were compared, and what they say.
    """
    visits = workload.visits
    compared = [i for i, visit in enumerate(visits) if visit.is_reproducible]
    expected = plainly([visits[i] for i in compared], max_num_seqs=32)
    for i, alone in zip(compared, expected, strict=True):
        said = workload.said[i]
        if i not in workload.left:
            assert said == alone, visits[i]
            continue
        assert alone.token_ids[: len(said.token_ids)] == said.token_ids, visits[i]
        assert alone.text.startswith(said.text)
    return compared, expected
