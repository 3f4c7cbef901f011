"""Losslessness under every parameter that looks at a text: token for token what K = 0 gives.

At temperature 0 and under `coupled`, in float64, for requests of random parameters that share a
batch with requests that use none; and the words that no output may hold, wherever a window ends.
"""

import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from outrider.engine.engine import LLMEngine
from outrider.engine.margins import MarginMeter
from outrider.sampling_params import SamplingParams
from tests.scripted_proposer import Drafter, ScriptedProposer
from tests.tiny_engine import VOCAB_SIZE, Decoded, Job, decode, make_engine, random_prompts
from tests.tiny_engine import tiny_model as make_tiny_model

NUM_REQUESTS = 14
MAX_TOKENS = 24
STUBS = ("perfect", "one_error", "random")

tiny_model = cache(make_tiny_model)


class NumberTokenizer:
    """Reads a text of numbers as token ids."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens, "what stands around a text is no part of a word"
        return [int(number) for number in text.split()]


def params_engine(k: int, **options: Any) -> LLMEngine:
    """An engine that can spell bad words."""
    engine = make_engine(tiny_model(), k, **options)
    engine._tokenizer = NumberTokenizer()  # type: ignore[assignment]
    return engine


@cache
def prompts() -> list[list[int]]:
    return random_prompts([3 + 2 * i for i in range(NUM_REQUESTS)], seed=4)


def random_params(index: int) -> SamplingParams:
    """Greedy ones and sampled ones, and every seventh request uses nothing of all this."""
    choose = random.Random(index)
    options: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "seed": index,
        "detokenize": False,
        "rejection_sample_method": "coupled",
        "ignore_eos": True,
        "temperature": 0.0 if index % 2 else choose.choice((0.5, 1.0)),
    }
    if index % 7:
        ids = choose.sample(range(VOCAB_SIZE), 24)
        # What is likely and what is not: prompts and outputs repeat themselves.
        words = [f"{a} {b}" for a, b in zip(ids[:12], ids[12:], strict=True)]
        options |= {
            "repetition_penalty": choose.choice((1.0, 1.2, 0.8)),
            "frequency_penalty": choose.uniform(-1, 1),
            "presence_penalty": choose.choice((0.0, 1.5)),
            "logit_bias": {token_id: choose.uniform(-2, 2) for token_id in ids[:6]},
            "bad_words": [*words, str(ids[7])],
            "stop_token_ids": ids[:9],
            "min_tokens": choose.randint(0, MAX_TOKENS),
            "top_k": choose.choice((0, 8)),
            "top_p": choose.choice((1.0, 0.9)),
            "min_p": choose.choice((0.0, 0.05)),
        }
    return SamplingParams(**options)


@cache
def references() -> list[Decoded]:
    """Plain decoding, each request alone."""
    return [
        decode(params_engine(0, max_num_seqs=1), [Job(prompt, random_params(i))])[0]
        for i, prompt in enumerate(prompts())
    ]


def ends(results: list[Decoded]) -> list[tuple[list[int], str | None, int | None]]:
    return [(one.token_ids, one.finish_reason, one.stop_reason) for one in results]


def test_the_parameters_matter() -> None:
    """Outputs are as long as they may be, or stopped at or after their least length."""
    reasons = [one.finish_reason for one in references()]
    assert set(reasons) == {"stop", "length"}
    for i, one in enumerate(references()):
        if one.finish_reason == "stop":
            assert len(one.token_ids) > random_params(i).min_tokens
    plain = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    jobs = [Job(prompt, plain) for prompt in prompts()[1::2]]
    others = decode(make_engine(tiny_model()), jobs)
    changed = [
        other.token_ids != reference.token_ids
        for other, reference in zip(others, references()[1::2], strict=True)
    ]
    assert sum(changed) >= 5


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("drafter", ["head", "stubs"])
def test_random_parameters(k: int, drafter: str) -> None:
    engine = params_engine(k)
    if drafter == "stubs":
        scripts = {}
        for i, (prompt, one) in enumerate(zip(prompts(), references(), strict=True)):
            stub = Drafter([*prompt, *one.token_ids], VOCAB_SIZE)
            names = {"one_error": stub.one_error(1 + i % k)}
            kind = STUBS[i % len(STUBS)]
            scripts[str(i)] = names.get(kind) or getattr(stub, kind)
        engine.proposer = ScriptedProposer(scripts, k)
    jobs = [Job(p, random_params(i), arrival=(3 * i) % 8) for i, p in enumerate(prompts())]
    assert ends(decode(engine, jobs)) == ends(references())
    assert engine.metrics.num_accepted_tokens > 20


def test_one_hot_drafts_under_random_parameters() -> None:
    engine = params_engine(3, draft_sample_method="greedy")
    jobs = [Job(prompt, random_params(i)) for i, prompt in enumerate(prompts())]
    assert ends(decode(engine, jobs)) == ends(references())


@pytest.mark.parametrize("limit", [5, 100])
def test_margins_measure_the_choices_that_were_made(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece and in pieces: what is chosen is the argmax of what the meter compares."""
    engine = params_engine(0, max_num_batched_tokens=limit)
    chosen: list[int] = []
    scores_of = MarginMeter.choice_scores

    def recorded(*args: Any) -> torch.Tensor:
        scores = scores_of(*args)
        chosen.extend(scores.argmax(-1).tolist())
        return scores

    monkeypatch.setattr(MarginMeter, "choice_scores", recorded)
    for i, (prompt, one) in enumerate(zip(prompts(), references(), strict=True)):
        chosen.clear()
        margins = engine.margins([*prompt, *one.token_ids], len(prompt), random_params(i))
        assert chosen[len(prompt) - 1 : -1] == one.token_ids
        assert (margins > 0).all()


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
def test_bad_word_of_two_tokens(k: int) -> None:
    """x then y is what plain decoding says, and all that is drafted: y is not said, x is.

    For each K the pair lies at every place of a window and across two windows.
    """
    jobs, pairs, scripts = [], [], {}
    for i, prompt in enumerate(prompts()[:5]):
        plain = references_without_words()[i]
        for place in range(8):
            x, y = plain[place : place + 2]
            pairs.append((i, place, x, y))
            scripts[str(len(jobs))] = Drafter([*prompt, *plain], VOCAB_SIZE).perfect
            options: dict[str, Any] = {"detokenize": False, "ignore_eos": True}
            words = [f"{x} {y}"]
            jobs.append(
                Job(
                    prompt, SamplingParams(temperature=0, max_tokens=12, bad_words=words, **options)
                )
            )
    engine = params_engine(k)
    if k:
        engine.proposer = ScriptedProposer(scripts, k)
    for (i, place, x, y), result in zip(pairs, decode(engine, jobs), strict=True):
        plain, got = references_without_words()[i], result.token_ids
        assert (x, y) not in pairwise(got)
        first = next(n for n in range(place + 1) if (plain[n], plain[n + 1]) == (x, y))
        assert got[: first + 1] == plain[: first + 1], "x alone is allowed"
    if k:
        assert engine.metrics.num_accepted_tokens > 50


@cache
def references_without_words() -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    jobs = [Job(prompt, params) for prompt in prompts()]
    return [one.token_ids for one in decode(params_engine(0), jobs)]


@pytest.mark.parametrize("k", [0, 3])
def test_masks_that_leave_nothing(k: int) -> None:
    """That request ends with an error, at the very token where nothing is left; others go on."""
    every_stop = {"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 1}
    every_word = {"bad_words": [f"{token_id} {other}" for token_id, other in all_pairs()]}
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": MAX_TOKENS,
            "detokenize": False,
            "rejection_sample_method": "coupled",
        }
        jobs = [
            Job(prompts()[0], SamplingParams(**options, **every_stop)),
            Job(prompts()[1], random_params(1)),
            Job(prompts()[2], SamplingParams(**options, **every_word, ignore_eos=True)),
            Job(prompts()[4], random_params(4)),
        ]
        results = decode(params_engine(k), jobs)
        assert ends(results[:1]) == [([], "error", None)]
        assert [len(results[2].token_ids), results[2].finish_reason] == [1, "error"]
        assert ends([results[1], results[3]]) == ends([references()[1], references()[4]])


def all_pairs() -> list[tuple[int, int]]:
    return [(a, b) for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE)]
