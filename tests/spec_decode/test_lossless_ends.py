"""Where a run ends: an end of sequence, a stop or the cap inside accepted drafts cuts just there.

What comes after is in no output and no counter, its blocks are free again, and a request that
ignores the end of sequence goes on as if there were none.
"""

from functools import cache

import pytest

from outrider.engine.engine import LLMEngine
from tests.scripted_proposer import Drafter, ScriptedProposer
from tests.tiny_engine import (
    VOCAB_SIZE,
    Decoded,
    Job,
    decode,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
)

NUM_PROMPTS, MAX_TOKENS = 8, 24
K = (1, 3, 8)

model = cache(tiny_model)


@cache
def texts() -> list[tuple[list[int], list[int]]]:
    """Prompts, and what plain decoding makes of each."""
    prompts = random_prompts([4 + 3 * i for i in range(NUM_PROMPTS)], seed=2)
    return [(p, decode_alone(model(), Job(p, greedy(MAX_TOKENS))).token_ids) for p in prompts]


@cache
def stops() -> list[tuple[int, int]]:
    """(prompt, place): every place of an output whose token is new there, so that it ends there."""
    return [
        (i, place)
        for i, (_, output) in enumerate(texts())
        for place, token_id in enumerate(output)
        if token_id not in output[:place]
    ]


def engine_with_perfect_drafts(k: int, members: list[int], *, is_clipped: bool = True) -> LLMEngine:
    """Request number n decodes prompt members[n]; all that is drafted for it is accepted."""
    engine = make_engine(model(), k)
    scripts = {
        str(n): Drafter([*texts()[i][0], *texts()[i][1]], VOCAB_SIZE).perfect
        for n, i in enumerate(members)
    }
    engine.proposer = ScriptedProposer(scripts, k, is_clipped)
    return engine


def assert_windows_of_cut(result: Decoded, k: int, num_tokens: int) -> None:
    """One token of the prompt's step, then windows of K accepted drafts, the last one cut."""
    assert result.windows[0] == (0, 0, 1)
    left = num_tokens - 1
    for window in result.windows[1:]:
        num_emitted = min(k + 1, left)
        # Of the drafts past the cut it stays known that they were drafted; accepted are the others.
        assert window == (k, min(k, num_emitted), num_emitted)
        left -= num_emitted
    assert left == 0


@pytest.mark.parametrize("k", K)
def test_stop_ids_at_every_place(k: int) -> None:
    covered = {place for _, place in stops()}
    assert covered >= set(range(2 * max(K) + 3)), "some place of a window is not tried"
    jobs = [
        Job(texts()[i][0], greedy(MAX_TOKENS, stop_token_ids=[texts()[i][1][place]]))
        for i, place in stops()
    ]
    # Room for all of the window even at the last places: what ends the run is the stop.
    engine = engine_with_perfect_drafts(k, [i for i, _ in stops()], is_clipped=False)
    results = decode(engine, jobs)
    for (i, place), result in zip(stops(), results, strict=True):
        output = texts()[i][1]
        assert result.token_ids == output[: place + 1]
        assert (result.finish_reason, result.stop_reason) == ("stop", output[place])
        if place + k < MAX_TOKENS:
            assert_windows_of_cut(result, k, place + 1)
    windows = [window for result in results for window in result.windows]
    metrics = engine.metrics
    assert metrics.num_target_passes == len(windows)
    assert metrics.num_draft_tokens == sum(num_drafts for num_drafts, _, _ in windows)
    assert metrics.num_accepted_tokens == sum(accepted for _, accepted, _ in windows)
    assert metrics.num_emitted_tokens == sum(place + 1 for _, place in stops())


@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("place", range(2 * max(K) + 3))
def test_the_end_of_sequence_at_every_place(place: int, k: int) -> None:
    """Declared on the engine, for whom a request of its own ends and another goes on."""
    i = next(prompt for prompt, where in stops() if where == place)
    prompt, output = texts()[i]
    engine = engine_with_perfect_drafts(k, [i, i, i])
    engine.eos_token_ids = frozenset([output[place]])
    jobs = [
        Job(prompt, greedy(MAX_TOKENS, ignore_eos=False)),
        Job(prompt, greedy(MAX_TOKENS)),
        Job(prompt, greedy(MAX_TOKENS, ignore_eos=False), arrival=2),
    ]
    ended, ignoring, late = decode(engine, jobs)
    for result in (ended, late):
        assert result.token_ids == output[: place + 1]
        assert (result.finish_reason, result.stop_reason) == ("stop", None)
    assert ended.windows == late.windows
    assert ignoring.token_ids == output
    assert (ignoring.finish_reason, ignoring.stop_reason) == ("length", None)


@pytest.mark.parametrize("k", K)
def test_every_cap(k: int) -> None:
    """Clipped as the head clips, a run ends at the cap with nothing drafted in vain."""
    caps = range(1, MAX_TOKENS + 1)
    members = [cap % NUM_PROMPTS for cap in caps]
    jobs = [Job(texts()[i][0], greedy(cap)) for i, cap in zip(members, caps, strict=True)]
    results = decode(engine_with_perfect_drafts(k, members), jobs)
    for i, cap, result in zip(members, caps, results, strict=True):
        assert result.token_ids == texts()[i][1][:cap]
        assert result.finish_reason == "length"
        assert all(drafts == accepted for drafts, accepted, _ in result.windows)
        expected = 1 + -(-(cap - 1) // (k + 1))
        assert len(result.windows) == expected, "perfect drafts, yet more passes than they need"


@pytest.mark.parametrize("k", K)
def test_every_cap_with_a_proposer_that_knows_none(k: int) -> None:
    """Drafts past the cap are cut in text and counters."""
    caps = range(1, MAX_TOKENS + 1)
    members = [cap % NUM_PROMPTS for cap in caps]
    jobs = [Job(texts()[i][0], greedy(cap)) for i, cap in zip(members, caps, strict=True)]
    engine = engine_with_perfect_drafts(k, members, is_clipped=False)
    results = decode(engine, jobs)
    for i, cap, result in zip(members, caps, results, strict=True):
        assert result.token_ids == texts()[i][1][:cap]
        assert result.finish_reason == "length"
        for num_drafts, num_accepted, num_emitted in result.windows:
            assert num_accepted == min(num_drafts, num_emitted)
    assert engine.metrics.num_emitted_tokens == sum(caps)


@pytest.mark.parametrize("k", [1, 8])
def test_the_end_of_max_model_len(k: int) -> None:
    """The cap that max_model_len sets; the last block is full to its last position."""
    prompt, output = texts()[3]
    length = 24
    assert length % 8 == 0
    for is_clipped in (True, False):
        engine = make_engine(model(), k, max_model_len=length, block_size=8)
        drafter = Drafter([*prompt, *output], VOCAB_SIZE)
        engine.proposer = ScriptedProposer({"0": drafter.perfect}, k, is_clipped)
        (result,) = decode(engine, [Job(prompt, greedy(1000))])
        assert result.token_ids == output[: length - len(prompt)]
        assert result.finish_reason == "length"
    (result,) = decode(make_engine(model(), k, max_model_len=length), [Job(prompt, greedy(1000))])
    assert result.token_ids == output[: length - len(prompt)]
