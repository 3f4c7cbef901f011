"""The grid of a sweep: what is one is decoded once, and every way has a row."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.entrypoints.acceptance import AcceptanceSample, TextAcceptance, sample_acceptance
from outrider.entrypoints.acceptance_sweep import AcceptanceSweep, Way
from outrider.entrypoints.llm import LLM
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.outputs import CompletionOutput, DecodeStep

RULES = ["standard", "block", "coupled"]
METHODS = ["probabilistic", "greedy"]
SUITES = {
    "code": [EncodedPrompt([5, 6]), EncodedPrompt([7]), EncodedPrompt([8])],
    "prose": [EncodedPrompt([9]), EncodedPrompt([10, 11])],
}
# A way as the tests write it: temperature, drafts, rule.
Short = tuple[float, str, str]
ONE_EACH: list[Short] = [
    (0.0, "probabilistic", "standard"),
    (1.0, "probabilistic", "standard"),
    (1.0, "probabilistic", "block"),
    (1.0, "probabilistic", "coupled"),
    (1.0, "greedy", "standard"),
    (1.0, "greedy", "coupled"),
]


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return LLM(
        model_dir,
        dtype="float64",
        max_model_len=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )


def sweep(llm: LLM, **changes: Any) -> AcceptanceSweep:
    given: dict[str, Any] = {
        "suites": SUITES,
        "ks": [1, 2],
        "temperatures": [0.0, 1.0],
        "draft_sample_methods": METHODS,
        "rules": RULES,
        "max_tokens": 12,
        "seed": 5,
    }
    return AcceptanceSweep(llm, **{**given, **changes})


def text(chance: random.Random, k: int) -> TextAcceptance:
    steps = [DecodeStep(n + 1, k, n) for n in chance.choices(range(k + 1), k=chance.randint(2, 6))]
    token_ids = list(range(sum(step.num_tokens for step in steps)))
    return TextAcceptance.of(CompletionOutput(0, "", token_ids, steps=steps))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the engines were asked for; they are answered by chance."""
    asked: list[dict[str, Any]] = []
    chance = random.Random(0)

    def answer(llm: LLM, prompts: Sequence[EncodedPrompt], **given: Any) -> AcceptanceSample:
        asked.append({"llm": llm, "prompts": prompts, **given})
        for index in range(len(prompts)):
            if given["on_finish"] is not None:
                given["on_finish"](index)
        return AcceptanceSample(given["k"], [text(chance, given["k"]) for _ in prompts])

    monkeypatch.setattr("outrider.entrypoints.acceptance_sweep.sample_acceptance", answer)
    return asked


def test_ways_that_are_one_are_decoded_once(llm: LLM, decoded: list[dict[str, Any]]) -> None:
    ways: list[Way] = []
    ended: list[int] = []
    one = sweep(llm, on_sample=lambda way, sample: ways.append(way), on_finish=ended.append)
    result = one.run()
    assert ways == [Way(suite, k, *short) for suite in SUITES for k in (1, 2) for short in ONE_EACH]
    assert one.num_texts == len(ended) == 2 * 6 * (3 + 2)
    for way, asked in zip(ways, decoded, strict=True):
        speculative = asked["llm"].llm_engine.config.speculative
        assert speculative.num_speculative_tokens == 2
        assert speculative.draft_sample_method == way.draft_sample_method
        assert asked["prompts"] == SUITES[way.suite]
        assert (asked["k"], asked["temperature"], asked["rule"]) == (
            way.k,
            way.temperature,
            way.rule,
        )
        assert (asked["max_tokens"], asked["seed"]) == (12, 5)
    assert all(result.samples[way] is result.samples[way.canonical()] for way in result.samples)
    assert len({id(sample) for sample in result.samples.values()}) == len(ways)


@pytest.mark.usefixtures("decoded")
def test_every_way_has_a_row_and_intervals(llm: LLM) -> None:
    result = sweep(llm).run()
    assert [Way.of(row) for row in result.rows] == [
        Way(suite, k, temperature, method, rule)
        for suite in SUITES
        for k in (1, 2)
        for temperature in (0.0, 1.0)
        for method in METHODS
        for rule in RULES
    ]
    assert [row.prompts for row in result.rows] == [3] * 24 + [2] * 24
    names = ("suite", "k", "temperature", "rule", "draft_sample_method")
    for row, intervals in zip(result.rows, result.intervals, strict=True):
        assert all(getattr(row, name) == getattr(intervals, name) for name in names)
        low, high = intervals.mean_acceptance_length_fresh or (0, 0)
        assert row.mean_acceptance_length_fresh is not None
        assert 1 <= low <= row.mean_acceptance_length_fresh <= high <= row.k + 1
        assert len(row.acceptance_rate_per_pos) == row.k
        for rate, interval in zip(
            row.acceptance_rate_per_pos, intervals.acceptance_rate_per_pos, strict=True
        ):
            low, high = interval or (1, 0)
            assert 0 <= low <= rate <= high <= 1


@pytest.mark.usefixtures("decoded")
def test_gains_are_paired_by_prompt(llm: LLM) -> None:
    result = sweep(llm).run()
    ways = [Way(suite, k, 1.0, "probabilistic", "block") for suite in SUITES for k in (1, 2)]
    for gain, way in zip(result.gains, ways, strict=True):
        assert Way(gain.suite, gain.k, gain.temperature, gain.draft_sample_method, gain.rule) == way
        assert gain.against == "standard"
        block = result.samples[way].length
        standard = result.samples[replace(way, rule="standard")].length
        assert gain.gain == pytest.approx(block.value - standard.value)
        n = gain.prompts
        assert n == len(SUITES[way.suite])
        pairs = zip(block.deviations, standard.deviations, strict=True)
        half = 1.959964 * (n / (n - 1) * sum((a - b) ** 2 for a, b in pairs)) ** 0.5
        low, high = max(gain.gain - half, -way.k), min(gain.gain + half, way.k)
        assert gain.ci95 == pytest.approx((low, high))


@pytest.mark.usefixtures("decoded")
def test_no_gain_where_one_rule_was_measured(llm: LLM) -> None:
    assert sweep(llm, rules=["block"]).run().gains == []
    assert sweep(llm, draft_sample_methods=["greedy"]).run().gains == []
    assert sweep(llm, temperatures=[0.0]).run().gains == []


def test_the_first_of_equal_ways_need_not_be_the_canonical_one(
    llm: LLM, decoded: list[dict[str, Any]]
) -> None:
    few = {"rules": ["block"], "draft_sample_methods": ["greedy"], "ks": [1]}
    result = sweep(llm, **few).run()
    assert [asked["rule"] for asked in decoded] == ["block"] * 4
    assert [row.rule for row in result.rows] == ["block"] * 4


def test_on_an_engine(llm: LLM) -> None:
    prompts = llm.encode_prompts(["def f(x):", "import os\n"])
    few = {"rules": ["coupled"], "ks": [1], "temperatures": [1.0]}
    result = sweep(llm, suites={"code": prompts}, **few).run()
    other = llm.with_num_speculative_tokens(1)
    assert result.samples[Way("code", 1, 1.0, "probabilistic", "coupled")] == sample_acceptance(
        other, prompts, temperature=1.0, rule="coupled", max_tokens=12, seed=5
    )
