"""Requests that begin alike: what is reused, and that nobody can tell from what is said.

In float64, where a text after a hit and the text of a cold run are equal token for token, and what
is drafted is too: so is every window of drafts.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.cache.groups import CacheGroup
from outrider.cache.prefix_cache import PrefixCache
from outrider.cache.snapshot_pool import SnapshotPool
from outrider.models.qwen4_exp.cache_specs import MTP_ATTENTION
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.mtp_proposer import MTPProposer
from tests.engine.prefix_runs import (
    BLOCK,
    MAX_TOKENS,
    K,
    ask,
    assert_alike,
    cold,
    cold_logits,
    logits_of,
    make,
    text,
    whole_blocks,
)
from tests.tiny_engine import Job, decode, greedy, make_engine, random_prompts, tiny_model


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


def test_a_head_leaves_no_rows_that_it_has_not_run() -> None:
    """Where its limit ends drafting for the first request, and not yet for the second."""
    limit = 3 * BLOCK + 5
    engine = make(drafter_max_model_len=limit)
    ask(engine, text()[: limit - 1], greedy(MAX_TOKENS))
    shorter = text()[: limit - 4]
    expected = cold(shorter, greedy(MAX_TOKENS), drafter_max_model_len=limit)
    assert any(num_drafts for num_drafts, _, _ in expected.windows)
    for num_expected in (0, 3 * BLOCK):
        assert ask(engine, shorter, greedy(MAX_TOKENS)) == (expected, num_expected)
