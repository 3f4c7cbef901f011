"""Where a run ends: an end of sequence, a stop or the cap inside accepted drafts cuts just there.

What comes after is in no output and no counter, its blocks are free again, and a request that
ignores the end of sequence goes on as if there were none. So it is for stop strings, wherever in
the tokens they begin and end, and the text of all steps together is that of plain decoding.
"""

import string
from dataclasses import replace
from functools import cache

import pytest
import torch

from outrider.engine.engine import LLMEngine
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.piece_tokenizer import piece_tokenizer
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
K_OF_STRINGS = (1, 2, 3, 4)
PLACES = range(2 * max(K_OF_STRINGS) + 3)
# Of each token two characters, of which the second is that of others as well, but for characters
# that have no token of their own.
PIECES = [f"{char}{i % 10}".encode() for i, char in enumerate(f"{string.ascii_letters}éßø日🎉")]
PIECES += [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x8e\x89"]
TOKENIZER = piece_tokenizer(PIECES)

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


def engine_with_perfect_drafts(
    k: int, members: list[int], *, is_clipped: bool = True, tokenizer: Tokenizer | None = None
) -> LLMEngine:
    """Request number n decodes prompt members[n]; all that is drafted for it is accepted."""
    engine = make_engine(model(), k, tokenizer)
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
    members = [i for i, _ in stops()]
    engine = engine_with_perfect_drafts(k, members, is_clipped=False, tokenizer=TOKENIZER)
    results = decode(engine, jobs)
    for (i, place), result in zip(stops(), results, strict=True):
        output = texts()[i][1]
        assert result.token_ids == output[: place + 1]
        assert (result.finish_reason, result.stop_reason) == ("stop", output[place])
        assert result.text == TOKENIZER.decode(output[:place])
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
    engine = engine_with_perfect_drafts(k, [i, i, i], tokenizer=TOKENIZER)
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
        assert result.text == TOKENIZER.decode(output[:place])
    assert ended.windows == late.windows
    assert (ignoring.token_ids, ignoring.text) == (output, TOKENIZER.decode(output))
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


@cache
def texts_by_token() -> list[list[str]]:
    """Of each output the text after so many tokens, from none to all."""
    shown = []
    for _, output in texts():
        detokenizer = IncrementalDetokenizer(TOKENIZER)
        pieces = [detokenizer.append([token_id]) for token_id in output]
        shown.append(["".join(pieces[:n]) for n in range(len(pieces) + 1)])
    return shown


@cache
def stop_strings(num_tokens: int) -> list[tuple[int, int, int, str]]:
    """(prompt, place, begin, string), one for each place: found first with the token at it.

    It is all the text of that token, or goes from the last character of the token `num_tokens`
    back to its first.
    """
    found: dict[int, tuple[int, int, int, str]] = {}
    for i, by_token in enumerate(texts_by_token()):
        for place in PLACES[num_tokens - 1 :]:
            end = len(by_token[place + 1])
            begin = len(by_token[place])
            if num_tokens > 1:
                begin, end = len(by_token[place - num_tokens + 2]) - 1, len(by_token[place]) + 1
            stop = by_token[place + 1][begin:end]
            is_whole = len(by_token[place]) < end <= len(by_token[place + 1])
            if is_whole and stop and by_token[place + 1].find(stop) == begin:
                found[place] = (i, place, begin, stop)
    assert len(found) == len(PLACES[num_tokens - 1 :]), "some place of a window is not tried"
    return list(found.values())


def decode_plain(jobs: list[Job]) -> list[Decoded]:
    return decode(make_engine(model(), tokenizer=TOKENIZER), jobs)


@pytest.mark.parametrize("includes_stop", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("k", K_OF_STRINGS)
def test_stop_strings_at_every_place(k: int, num_tokens: int, includes_stop: bool) -> None:
    stops_of = stop_strings(num_tokens)
    jobs = [
        Job(
            texts()[i][0],
            greedy(
                MAX_TOKENS, stop=[stop, "~"], include_stop_str_in_output=includes_stop, logprobs=1
            ),
        )
        for i, _, _, stop in stops_of
    ]
    members = [i for i, _, _, _ in stops_of]
    engine = engine_with_perfect_drafts(k, members, is_clipped=False, tokenizer=TOKENIZER)
    results = decode(engine, jobs)
    for (i, place, begin, stop), result in zip(stops_of, results, strict=True):
        assert result.token_ids == texts()[i][1][: place + 1]
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        end = begin + len(stop) * includes_stop
        assert result.text == texts_by_token()[i][-1][:end]
        assert_windows_of_cut(result, k, place + 1)
    accepted = sum(accepted for result in results for _, accepted, _ in result.windows)
    assert engine.metrics.num_accepted_tokens == accepted
    for result, plain in zip(results, decode_plain(jobs), strict=True):
        assert replace(plain, windows=result.windows, logprobs=result.logprobs) == result
        assert [entry.token_ids[0] for entry in result.logprobs] == result.token_ids
        logprobs, plain_logprobs = ([e.logprobs for e in r.logprobs] for r in (result, plain))
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(plain_logprobs))


@pytest.mark.parametrize("k", K_OF_STRINGS)
def test_text_that_is_held_back_at_every_cap(k: int) -> None:
    """Every character might begin a stop string, and none of them ever comes."""
    letters = "".join(sorted(set("".join(by_token[-1] for by_token in texts_by_token()))))
    caps = range(1, MAX_TOKENS + 1)
    members = [cap % NUM_PROMPTS for cap in caps]
    jobs = [
        Job(texts()[i][0], greedy(cap, stop=[f"{letter}~" for letter in letters]))
        for i, cap in zip(members, caps, strict=True)
    ]
    engine = engine_with_perfect_drafts(k, members, tokenizer=TOKENIZER)
    for i, cap, result in zip(members, caps, decode(engine, jobs), strict=True):
        output = texts()[i][1][:cap]
        assert (result.token_ids, result.finish_reason) == (output, "length")
        assert result.text == TOKENIZER.decode(output)


@pytest.mark.parametrize("k", K_OF_STRINGS)
def test_stop_strings_after_the_first_tokens(k: int) -> None:
    """A digit that comes again and again ends no output before `min_tokens`."""
    cases = [(i, least) for i in range(NUM_PROMPTS) for least in range(0, 12, 2)]
    jobs = [
        Job(texts()[i][0], greedy(MAX_TOKENS, min_tokens=least, stop=["3", "1", "7"]))
        for i, least in cases
    ]
    members = [i for i, _ in cases]
    engine = engine_with_perfect_drafts(k, members, is_clipped=False, tokenizer=TOKENIZER)
    num_stopped = 0
    for (i, least), result in zip(cases, decode(engine, jobs), strict=True):
        by_token = texts_by_token()[i]
        expected = next(
            (n for n in range(least + 1, MAX_TOKENS) if by_token[n][-1] in "317"), MAX_TOKENS
        )
        assert len(result.token_ids) == expected
        num_stopped += result.finish_reason == "stop"
    assert num_stopped > len(cases) // 2


@pytest.mark.parametrize("k", K_OF_STRINGS)
def test_stop_ids_after_the_first_tokens(k: int) -> None:
    """An id that would end an output too early is not said: the text goes another way."""
    cases = [(*next(s for s in stops() if s[1] == place), place) for place in PLACES]
    jobs = [
        Job(texts()[i][0], greedy(MAX_TOKENS, min_tokens=least, stop_token_ids=[texts()[i][1][at]]))
        for i, at, place in cases
        for least in (place, place + 1, place + 3)
    ]
    plain = decode_plain(jobs)
    engine = make_engine(model(), k, TOKENIZER)
    scripts = {
        str(n): Drafter([*job.prompt, *result.token_ids], VOCAB_SIZE).perfect
        for n, (job, result) in enumerate(zip(jobs, plain, strict=True))
    }
    engine.proposer = ScriptedProposer(scripts, k, is_clipped=False)
    for job, result, expected in zip(jobs, decode(engine, jobs), plain, strict=True):
        assert replace(expected, windows=result.windows) == result
        stop_ids, least = job.params.stop_token_ids, job.params.min_tokens
        assert stop_ids is not None
        assert not set(result.token_ids[:least]) & set(stop_ids)
        assert len(result.token_ids) > least
    ends = {len(result.token_ids) for result in plain[::3]}
    assert ends == {place + 1 for place in PLACES}, "the first token that may end an output does"
