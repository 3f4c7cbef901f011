"""The prefix cache with little room, with failures, and for requests that must not use it."""

from typing import Any

import pytest
import torch

from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.models.qwen4_exp.sparse_attention import Indexer
from tests.engine.prefix_runs import (
    BLOCK,
    K,
    ask,
    assert_alike,
    cold,
    cold_logits,
    logits_of,
    make,
    text,
)
from tests.tiny_engine import VOCAB_SIZE, Decoded, Job, decode, greedy, make_engine, tiny_model


def test_prompt_logprobs_run_the_whole_prompt() -> None:
    engine = make()
    ask(engine, text()[:30], greedy(4))
    engine.add_request("all", text()[:30], greedy(4, prompt_logprobs=1))
    (output,) = [one for one in engine.step() if one.prompt_logprobs is not None]
    assert len(output.prompt_logprobs) == 30
    assert output.num_cached_tokens == 0
    # As in vLLM it is not counted: nothing was looked for.
    assert engine.scheduler.prefix.num_queried_tokens == 30


def test_salts() -> None:
    engine = make()
    cached = []
    for salt in ("a", "b", None, "a", None):
        engine.add_request("x", text()[:30], greedy(2), cache_salt=salt)
        while engine.has_unfinished_requests():
            cached += [one.num_cached_tokens for one in engine.step() if one.finish_reason]
    assert cached == [0, 0, 0, 24, 24]


def test_what_comes_back_after_it_gave_way() -> None:
    """It begins where its snapshot is, and `num_cached_tokens` stays what it was."""
    engine = make(max_num_seqs=2)
    expected = cold(text()[:20], greedy(30))
    results = {"0": Decoded()}
    engine.add_request("0", text()[:20], greedy(30))
    starts = []
    schedule = engine.scheduler.schedule

    def recorded() -> Any:
        batch = schedule()
        starts.append(batch.spans[0].start)
        return batch

    engine.scheduler.schedule = recorded  # type: ignore[method-assign]
    number = 0
    while engine.has_unfinished_requests():
        number += 1
        if number % 4 == 0:
            engine.scheduler._preempt_last()
        for output in engine.step():
            results["0"].token_ids += output.new_token_ids
            assert output.num_cached_tokens == 0
        engine.cache_manager.check_integrity()
    assert results["0"].token_ids == expected.token_ids
    assert engine.scheduler.num_preemptions >= 3
    assert starts.count(0) == 1
    assert all(start % BLOCK == 0 for start in starts[3::4])


@pytest.mark.parametrize(("num_blocks", "num_snapshots"), [(9, 1), (12, 5), (20, 2)])
def test_little_room(num_blocks: int, num_snapshots: int) -> None:
    """What is found may be less; what is said is the same, and nobody waits for ever."""
    plan = make().cache_plan
    engine = make(
        kv_cache_memory=num_blocks * plan.bytes_per_block,
        prefix_cache_memory=num_snapshots * plan.bytes_per_snapshot,
        max_num_seqs=3,
    )
    common = text()[:32]
    jobs = [
        Job([*common[: 8 * (i % 4 + 1)], *text(5, seed=i % 3)], greedy(10), arrival=i)
        for i in range(8)
    ]
    plain = make(enable_prefix_caching=False)
    expected = [said.token_ids for said in decode(plain, jobs)]
    assert [said.token_ids for said in decode(engine, jobs)] == expected
    assert [said.token_ids for said in decode(engine, jobs)] == expected
    assert engine.cache_manager.prefix.snapshots.num_published <= num_snapshots
    assert engine.scheduler.prefix.num_hit_tokens > 0


def test_few_snapshots_lie_where_prompts_begin() -> None:
    """At the ends, at the place where texts part, and at a stride between."""
    plan = make().cache_plan
    engine = make(prefix_cache_memory=8 * plan.bytes_per_snapshot, max_model_len=256)
    system = text(100, seed=8)
    texts = [[*system, *text(30, seed=i)] for i in (1, 2, 3)]
    assert ask(engine, texts[0], greedy(4))[1] == 0
    kept = engine.cache_manager.prefix.snapshots
    # 16 blocks of the prompt, 8 snapshots: every eighth block, and the last ones.
    assert kept.num_published == 2
    assert ask(engine, texts[0], greedy(4))[1] == 128
    assert ask(engine, texts[1], greedy(4))[1] == 64
    # The second has left a snapshot where it parted from the first.
    assert ask(engine, texts[2], greedy(4))[1] == 96


def test_an_output_keeps_its_last_snapshot_where_there_are_few() -> None:
    plan = make().cache_plan
    engine = make(prefix_cache_memory=4 * plan.bytes_per_snapshot)
    said, _ = ask(engine, text()[:17], greedy(60))
    whole = text()[:17] + said.token_ids
    assert ask(engine, text()[:17], greedy(1))[1] == 16
    assert ask(engine, [*whole, 3], greedy(1))[1] == 72


def test_counts() -> None:
    engine = make()
    sharing = engine.scheduler.prefix
    cached = []
    for length in (20, 30, 30, 5):
        engine.add_request("x", text()[:length], greedy(3))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finish_reason:
                    cached.append(output.num_cached_tokens)
    assert cached == [0, 16, 24, 0]
    assert (sharing.num_queried_tokens, sharing.num_hit_tokens) == (85, 40)


def test_it_can_be_forgotten() -> None:
    engine = make()
    ask(engine, text()[:30], greedy(3))
    engine.add_request("running", text()[:30], greedy(20))
    engine.step()
    engine.reset_prefix_cache()
    engine.cache_manager.check_integrity()
    assert engine.cache_manager.prefix.snapshots.num_published == 0
    results = {"running": Decoded()}
    while engine.has_unfinished_requests():
        for output in engine.step():
            results["running"].token_ids += output.new_token_ids
        engine.cache_manager.check_integrity()
    assert len(results["running"].token_ids) == 20 - 1
    expected = cold(text()[:30], greedy(3))
    assert ask(engine, text()[:30], greedy(3)) == (expected, 0)
    assert ask(engine, text()[:30], greedy(3)) == (expected, 24)


def bad_model() -> Qwen4ExpForCausalLM:
    """One id has no finite embedding."""
    other = tiny_model()
    with torch.no_grad():
        other.model.embed_tokens.weight[VOCAB_SIZE - 1] = torch.nan
    return other


def test_what_broke_is_not_shared() -> None:
    """The tokens of a request that ended in an error are run again."""
    engine = make_engine(bad_model(), K, block_size=BLOCK)
    prompt = [token % (VOCAB_SIZE - 1) for token in text()[:30]]
    sound, _ = ask(engine, prompt, greedy(4))
    broken = [*prompt, VOCAB_SIZE - 1, *prompt]
    for _ in range(2):
        said, num_cached = ask(engine, broken, greedy(4))
        assert (said.finish_reason, said.token_ids) == ("error", [])
    # All that it had run is doubted, also what it had of others.
    assert num_cached == 0
    assert ask(engine, prompt, greedy(4)) == (sound, 0)
    assert ask(engine, prompt, greedy(4)) == (sound, 24)


@pytest.mark.parametrize("k", [0, K])
def test_a_pass_that_fails_has_pooled_no_index_keys(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of its first piece is shared, and the index keys of it are still to be made."""
    engine = make(k, max_num_batched_tokens=BLOCK)
    prompt = text()[:30]
    engine.add_request("x", prompt, greedy(8))
    engine.step()
    assert engine.cache_manager.prefix.snapshots.num_published

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Indexer, "rebuild", fails)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort_request("x")
    engine.cache_manager.check_integrity()
    seen = logits_of(engine)
    said, num_cached = ask(engine, prompt, greedy(8))
    assert num_cached == BLOCK
    expected, wanted = cold_logits(prompt, greedy(8), k)
    assert said.token_ids == expected.token_ids
    # The pieces of a prompt have logits of their own; those of what was said stand at the end.
    count = len(wanted)
    assert_alike(seen[-count:], wanted)


def test_a_step_that_fails_leaves_nothing() -> None:
    engine = make()
    engine.add_request("x", text()[:30], greedy(5))
    propose = engine.proposer.propose

    def fails(*args: Any) -> Any:
        raise RuntimeError("no draft")

    engine.proposer.propose = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        engine.step()
    engine.proposer.propose = propose  # type: ignore[method-assign]
    engine.cache_manager.check_integrity()
    snapshots = engine.cache_manager.prefix.snapshots
    assert (snapshots.num_published, len(snapshots._reserved)) == (0, 0)
    results = {"x": Decoded()}
    while engine.has_unfinished_requests():
        for output in engine.step():
            results["x"].token_ids += output.new_token_ids
    assert results["x"].token_ids == cold(text()[:30], greedy(5)).token_ids
