"""Acceptance over prompts: fresh windows by hand, and what an engine's texts give."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from outrider.config import SpeculativeConfig
from outrider.entrypoints.acceptance import (
    AcceptanceRow,
    AcceptanceSample,
    TextAcceptance,
    repeated_tokens,
    sample_acceptance,
)
from outrider.entrypoints.decode_run import DecodeRun
from outrider.entrypoints.llm import LLM
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.outputs import CompletionOutput, DecodeStep
from outrider.sampling_params import SamplingParams
from tests.entrypoints.acceptance_keys import ROW_KEYS

TEXTS = ["def f(x):", "import os\n", "class A:\n    pass\n", "a b a b a b"]


def text(*steps: tuple[list[int], int, int]) -> TextAcceptance:
    """Of steps, each with its tokens and how many were drafted and accepted."""
    token_ids = [one for emitted, _, _ in steps for one in emitted]
    passes = [DecodeStep(len(emitted), *counts) for emitted, *counts in steps]
    return TextAcceptance.of(CompletionOutput(0, "", token_ids, steps=passes))


def test_repeated_tokens_by_hand() -> None:
    ngram = [1, 2, 3, 4, 5, 6, 7, 8]
    assert repeated_tokens([]) == []
    assert repeated_tokens(ngram[:3]) == [False] * 3
    # The token that ends the second 8-gram is repeated, those before it are not.
    assert repeated_tokens([*ngram, *ngram]) == [False] * 15 + [True]
    assert repeated_tokens([*ngram, *ngram, 9]) == [False] * 15 + [True, False]
    # A run of one token: the first 8-gram ends at index 7.
    assert repeated_tokens([5] * 10) == [False] * 8 + [True] * 2
    # 64 tokens back counts, 65 do not.
    between = list(range(100, 156))
    assert len([*between, *ngram]) == 64
    assert repeated_tokens([*ngram, *between, *ngram])[-1]
    assert not repeated_tokens([*ngram, *between, 99, *ngram])[-1]
    # What counts is the latest time that it ended.
    assert repeated_tokens([*ngram, 99, *ngram, *between, *ngram])[-1]


def test_fresh_windows_by_hand() -> None:
    one = text(
        ([5], 0, 0),
        ([5, 5, 5, 5], 3, 3),
        ([5, 5, 5], 3, 2),  # the first 8-gram ends here, and has not ended before
        ([5, 6], 3, 1),  # the first of the two tokens is repeated
        ([7], 2, 0),
        ([8], 0, 0),  # no draft, no window
    )
    assert (one.num_tokens, one.num_repeated_tokens) == (12, 1)
    assert (one.windows.num_drafts, one.windows.num_accepted_tokens) == (4, 6)
    assert (one.fresh_windows.num_drafts, one.fresh_windows.num_accepted_tokens) == (3, 5)
    # A pass without drafts is no window, fresh or not.
    assert one.fresh_windows.num_target_passes == 3
    other = text(([1], 0, 0), ([2, 3], 3, 1))
    row = AcceptanceSample(3, [one, other]).row(
        suite="code", temperature=0.0, rule="block", draft_sample_method="greedy"
    )
    assert list(asdict(row)) == ROW_KEYS == [one.name for one in fields(AcceptanceRow)]
    assert row.prompts == 2
    assert row.mean_acceptance_length == pytest.approx(1 + 7 / 5)
    assert row.mean_acceptance_length_fresh == pytest.approx(1 + 6 / 4)
    assert row.acceptance_rate == pytest.approx(7 / (3 + 3 + 3 + 2 + 3))
    assert row.acceptance_rate_per_pos == pytest.approx([4 / 5, 2 / 5, 1 / 4])
    assert row.repeated_share == pytest.approx(1 / 15)
    # Deviations (6 - 1.4 * 4) / 5 and (1 - 1.4) / 5, of two prompts.
    error = (2 / 1 * 2 * 0.08**2) ** 0.5
    assert row.ci95 == pytest.approx((2.4 - 1.959964 * error, 2.4 + 1.959964 * error))


def test_what_there_is_not() -> None:
    looping = text(*[([5], 0, 0)] * 8, ([5], 1, 0), ([5], 2, 0))
    row = AcceptanceSample(2, [looping]).row(
        suite="code", temperature=0.0, rule="block", draft_sample_method="greedy"
    )
    assert (row.mean_acceptance_length, row.ci95) == (1, None)
    assert row.mean_acceptance_length_fresh is None
    assert row.acceptance_rate_per_pos == [0, 0]
    undrafted = AcceptanceSample(2, [text(([5], 0, 0))])
    with pytest.raises(RequestError, match="no drafts were verified in the 1 texts: take other"):
        undrafted.length  # noqa: B018


def test_a_length_interval_ends_where_lengths_do() -> None:
    texts = [text(([1], 0, 0), ([2, 3, 4], 2, 2)) for _ in range(3)]
    worse = text(([1], 0, 0), ([2, 3], 2, 1))
    sample = AcceptanceSample(2, [*texts, worse])
    low, high = sample.length_ci95(sample.length) or (0, 0)
    assert low < 2.75
    assert high == 3


@pytest.fixture(scope="module")
def exact_llm(model_dir: Path) -> LLM:
    """In float64, where what a request gets does not depend on its mates by a bit."""
    return LLM(
        model_dir,
        dtype="float64",
        max_model_len=128,
        max_num_seqs=4,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
    )


def prompts(llm: LLM) -> list[EncodedPrompt]:
    return llm.encode_prompts(TEXTS)


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "block"), (1.0, "block")])
def test_the_figures_are_those_of_the_engine(exact_llm: LLM, temperature: float, rule: str) -> None:
    before = replace(exact_llm.llm_engine.metrics)
    sample = sample_acceptance(
        exact_llm, prompts(exact_llm), temperature=temperature, rule=rule, max_tokens=12, seed=7
    )
    row = sample.row(
        suite="code", temperature=temperature, rule=rule, draft_sample_method="probabilistic"
    )
    after = exact_llm.llm_engine.metrics
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    num_drafts = after.num_drafts - before.num_drafts
    assert num_drafts >= 4 * 8 / 4
    assert row.mean_acceptance_length == pytest.approx(1 + accepted / num_drafts)
    assert (row.suite, row.k, row.temperature, row.rule) == ("code", 3, temperature, rule)
    assert row.prompts == 4
    low, high = row.ci95 or (0, 0)
    assert 1 <= low <= row.mean_acceptance_length <= high <= 4


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
def test_together_is_as_alone(exact_llm: LLM, rule: str) -> None:
    settings = {"temperature": 1.0, "rule": rule, "max_tokens": 12}
    encoded = prompts(exact_llm)
    together = sample_acceptance(exact_llm, encoded, seed=3, **settings)  # type: ignore[arg-type]
    assert any(one.windows.num_accepted_tokens for one in together.texts)
    for index, prompt in enumerate(encoded):
        alone = sample_acceptance(exact_llm, [prompt], seed=3 + index, **settings)  # type: ignore[arg-type]
        assert alone.texts == [together.texts[index]]


def test_fewer_drafts_are_those_of_an_engine_with_fewer(exact_llm: LLM) -> None:
    settings = {"temperature": 1.0, "rule": "block", "max_tokens": 12, "seed": 0}
    fewer = sample_acceptance(exact_llm, prompts(exact_llm), k=2, **settings)  # type: ignore[arg-type]
    other = exact_llm.with_num_speculative_tokens(2)
    assert fewer == sample_acceptance(other, prompts(other), **settings)  # type: ignore[arg-type]
    assert fewer.k == 2
    assert len(fewer.rate_per_pos) == 2


def test_ways_that_are_one(exact_llm: LLM) -> None:
    # One-hot drafts under block and standard; and every rule and draft at temperature 0.
    one_hot = exact_llm.with_speculative(SpeculativeConfig(draft_sample_method="greedy"))

    def measure(llm: LLM, temperature: float, rule: str) -> AcceptanceSample:
        given = {"temperature": temperature, "rule": rule, "max_tokens": 12, "seed": 0}
        return sample_acceptance(llm, prompts(llm), **given)  # type: ignore[arg-type]

    assert measure(one_hot, 1.0, "block") == measure(one_hot, 1.0, "standard")
    assert measure(one_hot, 1.0, "block") != measure(exact_llm, 1.0, "block")
    greedy = measure(exact_llm, 0.0, "block")
    assert measure(exact_llm, 0.0, "standard") == greedy
    assert measure(one_hot, 0.0, "coupled") == greedy


def test_bad_input(exact_llm: LLM) -> None:
    plain = exact_llm.with_speculative(None)
    cases: list[tuple[LLM, dict[str, object], type[OutriderError], str]] = [
        (plain, {}, ConfigError, "acceptance needs drafts: give speculative_config"),
        (exact_llm, {"prompts": []}, RequestError, "needs at least one prompt"),
        (exact_llm, {"max_tokens": 2}, RequestError, "max_tokens must be 3 or more for a draft"),
        (exact_llm, {"seed": -1}, RequestError, "seed must be 0 or more, got -1"),
        (exact_llm, {"rule": "none"}, RequestError, "must be standard, block or coupled"),
        (exact_llm, {"temperature": -1.0}, RequestError, "temperature must be a finite number"),
    ]
    for llm, change, error, reason in cases:
        given = {"temperature": 1.0, "rule": "block", "max_tokens": 8, "seed": 0, **change}
        encoded = given.pop("prompts", prompts(exact_llm))
        with pytest.raises(error, match=reason):
            sample_acceptance(llm, encoded, **given)  # type: ignore[arg-type]


def test_a_model_that_is_not_finite_is_no_measurement(
    exact_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DecodeRun.run

    def broken(
        self: DecodeRun, prompts: list[EncodedPrompt], params: list[SamplingParams]
    ) -> object:
        outputs = run(self, prompts, params)
        outputs[1].outputs[0].finish_reason = "error"
        return outputs

    monkeypatch.setattr(DecodeRun, "run", broken)
    with pytest.raises(RequestError, match=r"^prompts\[1\]: the model's probabilities are not fin"):
        sample_acceptance(
            exact_llm, prompts(exact_llm), temperature=1.0, rule="block", max_tokens=4, seed=0
        )
