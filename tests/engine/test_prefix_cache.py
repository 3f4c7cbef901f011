"""Requests that begin alike: what is reused, and that nobody can tell from what is said.

In float64, where a text after a hit and the text of a cold run are equal token for token, and what
is drafted is too: so is every window of drafts.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from outrider.cache.groups import CacheGroup
from outrider.cache.prefix_cache import PrefixCache
from outrider.cache.snapshot_pool import SnapshotPool
from outrider.engine.engine import LLMEngine
from outrider.models.qwen4_exp.cache_specs import MTP_ATTENTION
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.mtp_proposer import MTPProposer
from tests.tiny_engine import (
    VOCAB_SIZE,
    Decoded,
    Job,
    decode,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
)

BLOCK, K, MAX_TOKENS = 8, 3, 12

model = cache(tiny_model)


@cache
def text(length: int = 60, seed: int = 5) -> list[int]:
    return random_prompts([length], seed)[0]


def make(k: int = K, **options: Any) -> LLMEngine:
    return make_engine(model(), k, **{"max_num_seqs": 4, "block_size": BLOCK, **options})


def cold(prompt: Sequence[int], params: SamplingParams, k: int = K, **options: Any) -> Decoded:
    """What a request says, and how it is drafted, where nothing is kept of anybody."""
    engine = make(k, enable_prefix_caching=False, **options)
    return decode(engine, [Job(list(prompt), params)])[0]


def ask(engine: LLMEngine, prompt: Sequence[int], params: SamplingParams) -> tuple[Decoded, int]:
    """What a request says, and how many tokens of its prompt did not have to run."""
    before = engine.scheduler.prefix.num_hit_tokens
    (said,) = decode(engine, [Job(list(prompt), params)])
    return said, engine.scheduler.prefix.num_hit_tokens - before


def logits_of(engine: LLMEngine) -> list[torch.Tensor]:
    """Collects the logits of the target, and those that the head's drafts are drawn from."""
    seen, verify = [], engine.model_runner.verify

    def verified(*args: Any) -> Any:
        target = verify(*args)
        seen.append(target.logits.clone())
        return target

    engine.model_runner.verify = verified  # type: ignore[method-assign]
    if isinstance(engine.proposer, MTPProposer):
        draw = engine.proposer._sampler.draw

        def drawn(logits: torch.Tensor, *args: Any) -> Any:
            seen.append(logits.clone())
            return draw(logits, *args)

        engine.proposer._sampler.draw = drawn
    return seen


def cold_logits(
    prompt: list[int], params: SamplingParams, k: int = K
) -> tuple[Decoded, list[torch.Tensor]]:
    """What a request says in a cold run, and all logits on the way."""
    engine = make(k, enable_prefix_caching=False)
    seen = logits_of(engine)
    return decode(engine, [Job(prompt, params)])[0], seen


def assert_alike(seen: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Logits are those of a cold run; what was seen is emptied."""
    for logits, wanted in zip(seen, expected, strict=True):
        assert torch.allclose(logits, wanted, rtol=0, atol=1e-12)
    seen.clear()


def whole_blocks(num_tokens: int) -> int:
    """Tokens before the last boundary at which a prompt can begin: its last token runs."""
    return (num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("k", [0, 1, K])
def test_a_prompt_that_comes_again(k: int) -> None:
    """At every length around a boundary; the first answer, and then what it was cached from."""
    lengths = [1, *(b + i for b in (8, 16, 40) for i in (-1, 0, 1))]
    engine = make(k)
    for length in lengths:
        prompt = text()[:length]
        expected = cold(prompt, greedy(MAX_TOKENS), k)
        for _ in range(2):
            said, num_cached = ask(engine, prompt, greedy(MAX_TOKENS))
            assert said == expected, length
        assert num_cached == whole_blocks(length)


@pytest.mark.parametrize("k", [0, K])
def test_the_turns_of_a_chat(k: int) -> None:
    """Each begins with all that was said before: all of its whole blocks are reused.

    Those too that were completed by the very last rows of an answer, after which nothing was
    drafted.
    """
    engine = make(k)
    seen = logits_of(engine)
    said: list[int] = []
    for turn, (length, max_tokens) in enumerate(((16, 1), (3, 14), (8, 5), (1, 12), (7, 4))):
        prompt = [*said, *random_prompts([length], seed=turn)[0]]
        answer, num_cached = ask(engine, prompt, greedy(max_tokens))
        expected, logits = cold_logits(prompt, greedy(max_tokens), k)
        assert answer == expected
        assert_alike(seen, logits)
        # The last token of an answer has not run.
        assert num_cached == (len(said) - 1) // BLOCK * BLOCK if said else num_cached == 0
        said = prompt + answer.token_ids


def test_a_block_that_accepted_drafts_completed() -> None:
    """Its snapshot has seen drafts that were kept, and no others."""
    (prompt,) = random_prompts([21], seed=1)
    engine = make()
    first, _ = ask(engine, prompt, greedy(40))
    whole = prompt + first.token_ids
    crossed, start = [], len(prompt) - 1
    for _, num_accepted, num_tokens in first.windows:
        kept = range(start + 2, start + 2 + num_accepted)
        crossed += [boundary for boundary in kept if boundary % BLOCK == 0]
        start += num_tokens
    assert len(crossed) == 2, "windows of this text cross boundaries with their drafts"
    for length in (boundary + i for boundary in crossed for i in (-1, 0, 1, 2)):
        said, num_cached = ask(engine, whole[:length], greedy(6))
        assert said == cold(whole[:length], greedy(6)), length
        assert num_cached == whole_blocks(length)


def test_another_token_after_a_shared_block() -> None:
    """The head's row before it is made of that token: each request has its own.

    What the head draws its drafts from is what it is in a cold run, and so is the target's law.
    """
    common = text()[:24]
    prompts = [[*common, token, *text(20, seed=token)] for token in (7, 11, 19)]
    expected = [cold_logits(prompt, greedy(20)) for prompt in prompts]
    engine = make()
    seen = logits_of(engine)
    for i in (0, 1, 2, 1, 0, 2):
        said, num_cached = ask(engine, prompts[i], greedy(20))
        assert said == expected[i][0]
        assert_alike(seen, expected[i][1])
    assert num_cached == whole_blocks(len(prompts[2]))
    pool = engine.cache_manager.block_tables[MTP_ATTENTION].pool
    # Three blocks of the head that end at the same tokens, one for each token that comes next.
    alike = [sorted(found) for found in pool._by_content.values() if len(found) > 1]
    assert alike == [[7, 11, 19]]


def test_requests_at_once() -> None:
    """Others run over the very blocks that a request shares, and go before it or after."""
    common = text()[:32]
    jobs = [
        Job([*common[: 32 - 3 * i], *text(9, seed=i)], greedy(8 + 4 * i), arrival=2 * i)
        for i in range(6)
    ]
    expected = [cold(job.prompt, job.params) for job in jobs]
    engine = make(max_num_seqs=6)
    for _ in range(2):
        assert [said.token_ids for said in decode(engine, jobs)] == [
            said.token_ids for said in expected
        ]
    assert engine.scheduler.prefix.num_hit_tokens > 8 * BLOCK


@pytest.mark.parametrize("chunk", [5, 16])
def test_prompts_in_pieces(chunk: int) -> None:
    engine = make(long_prefill_token_threshold=chunk)
    for length in (41, 58):
        expected = cold(text()[:length], greedy(5))
        for _ in range(2):
            said, num_cached = ask(engine, text()[:length], greedy(5))
            assert said.token_ids == expected.token_ids
        assert num_cached == whole_blocks(length)


@pytest.mark.parametrize("options", [{"index_share_for_mtp_iteration": True}, {"method": "ngram"}])
def test_other_ways_to_draft(options: dict[str, Any]) -> None:
    engine = make(**options)
    for length in (30, 33, 40, 50):
        expected = cold(text()[:length], greedy(MAX_TOKENS), **options)
        for _ in range(2):
            said, num_cached = ask(engine, text()[:length], greedy(MAX_TOKENS))
            assert said == expected
        assert num_cached == whole_blocks(length)


def test_a_request_without_drafts_leaves_no_head() -> None:
    """One that drafts runs its prompt then, so that it is drafted as if nobody had been there."""
    prompt = text()[:41]
    plain = greedy(MAX_TOKENS, num_speculative_tokens=0)
    engine = make()
    assert ask(engine, prompt, plain) == (cold(prompt, plain), 0)
    assert ask(engine, prompt, plain) == (cold(prompt, plain), 40)
    assert ask(engine, prompt, greedy(MAX_TOKENS)) == (cold(prompt, greedy(MAX_TOKENS)), 0)
    assert ask(engine, prompt, greedy(MAX_TOKENS)) == (cold(prompt, greedy(MAX_TOKENS)), 40)
    assert ask(engine, prompt, plain) == (cold(prompt, plain), 40)


@pytest.mark.parametrize("rule", ["coupled", "block", "standard"])
def test_sampled_texts(rule: Any) -> None:
    """The noise of a position does not depend on what was cached before it."""
    engine = make()
    for seed in range(3):
        params = SamplingParams(
            temperature=0.9, seed=seed, max_tokens=20, rejection_sample_method=rule
        )
        expected = cold(text()[:33], params)
        for _ in range(2):
            said, num_cached = ask(engine, text()[:33], params)
            assert said == expected
    assert num_cached == 32


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_hit_every_bit_is_that_of_an_engine_without_a_cache(dtype: torch.dtype) -> None:
    """Keeping states on the way changes nothing of the way, alone or beside others."""
    other = tiny_model(dtype)
    prompts = random_prompts([1, 7, 16, 30, 57], seed=9)
    jobs = [Job(prompt, greedy(20), arrival=i) for i, prompt in enumerate(prompts)]
    runs = []
    for is_on in (True, False):
        engine = make_engine(other, K, enable_prefix_caching=is_on, max_num_batched_tokens=40)
        seen = logits_of(engine)
        said = decode(engine, jobs)
        runs.append((seen, [one.windows for one in said], [one.token_ids for one in said]))
        assert engine.scheduler.prefix is None or engine.scheduler.prefix.num_hit_tokens == 0
    assert runs[0][1:] == runs[1][1:]
    assert len(runs[0][0]) == len(runs[1][0]) > 20
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))


def stale_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's row before a hit stays what another request made of it."""
    monkeypatch.setattr(MTPProposer, "_last_streams", lambda self, row: None)


def early_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot has not seen the drafts that were accepted before its boundary."""
    save = PrefixCache.save
    monkeypatch.setattr(
        PrefixCache,
        "save",
        lambda self, rows, slots, counts: save(self, rows, slots, [0] * len(counts)),
    )


def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request runs last is not followed by the head."""
    monkeypatch.setattr(MTPProposer, "_left_to_others", lambda *_: [])


def late_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's row before a hit is made of the streams of another row."""
    keep = SnapshotPool.keep_streams
    monkeypatch.setattr(
        SnapshotPool, "keep_streams", lambda self, slots, x: keep(self, slots, x.roll(1, -1))
    )


def empty_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's last block of a hit is not that of the other request."""
    copy = CacheGroup.copy
    monkeypatch.setattr(CacheGroup, "copy", lambda self, a, b: copy(self, torch.zeros_like(a), b))


@pytest.mark.parametrize("fault", [stale_head, late_streams, empty_end, early_state, no_end])
def test_the_tests_above_would_notice(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    tests = {
        early_state: test_a_block_that_accepted_drafts_completed,
        no_end: lambda: test_the_turns_of_a_chat(K),
    }
    with pytest.raises(AssertionError):
        tests.get(fault, test_another_token_after_a_shared_block)()
