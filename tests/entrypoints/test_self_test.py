"""The self-test finds what differs, says where, and forgives near-ties alone."""

import math

import pytest

from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.entrypoints.self_test import Report, SelfTest, first_difference
from outrider.errors import RequestError
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer
from tests.entrypoints.scripted_engine import ScriptedEngine, TableEngine, emit

PROMPTS = [EncodedPrompt([index, 50]) for index in range(4)]
TEXT = [10, 11, 12, 13]


def run(engine: TableEngine, k: list[int]) -> Report:
    return SelfTest(engine, PROMPTS, k, max_tokens=4).run()  # type: ignore[arg-type]


def same(index: int, params: SamplingParams) -> list[int]:
    return TEXT


def wrong_at_two(index: int, params: SamplingParams) -> list[int]:
    """Prompt 2 goes wrong at K = 3 under `coupled`, at position 1."""
    is_wrong = (index, params.num_speculative_tokens, params.temperature) == (2, 3, 1.0)
    return [10, 99, 12, 13] if is_wrong else TEXT


def test_equal_texts_pass(tokenizer: Tokenizer) -> None:
    runs: list[tuple[str, int]] = []
    engine = TableEngine(tokenizer, same)
    test = SelfTest(engine, PROMPTS, [1, 3], 4, lambda *one: runs.append(one))  # type: ignore[arg-type]
    report = test.run()
    assert report.is_lossless
    assert runs == [(rule, k) for rule in ("greedy", "coupled") for k in (0, 1, 3)]
    assert report.num_tokens == 2 * 2 * 4 * 4
    assert report.to_dict() == {
        "prompts": 4,
        "k": [1, 3],
        "mismatches": [],
        "near_ties": [],
        "mean_acceptance_length": 4.0,
    }
    assert engine.asked == []


def test_asks_for_both_rules_with_the_same_seeds(tokenizer: Tokenizer) -> None:
    asked: list[SamplingParams] = []

    def answer(index: int, params: SamplingParams) -> list[int]:
        asked.append(params)
        return TEXT

    run(TableEngine(tokenizer, answer), [5])
    assert [one.num_speculative_tokens for one in asked] == ([0] * 4 + [5] * 4) * 2
    assert [one.temperature for one in asked] == [0] * 8 + [1] * 8
    assert [one.rejection_sample_method for one in asked] == [None] * 8 + ["coupled"] * 8
    assert [one.seed for one in asked] == list(range(4)) * 4


def test_a_difference_is_a_mismatch(tokenizer: Tokenizer) -> None:
    engine = TableEngine(tokenizer, wrong_at_two, margin=0.25)
    report = run(engine, [1, 3])
    assert not report.is_lossless
    assert report.near_ties == []
    assert report.to_dict()["mismatches"] == [
        {"prompt": 2, "position": 1, "margin": 0.25, "rule": "coupled", "k": 3}
    ]
    # The margins are those of the plain decoding up to the choice of the differing token.
    ((token_ids, num_prompt_tokens, params),) = engine.asked
    assert (token_ids, num_prompt_tokens) == ([2, 50, 10], 2)
    assert (params.num_speculative_tokens, params.rejection_sample_method) == (0, "coupled")


def test_a_small_margin_makes_it_a_near_tie(tokenizer: Tokenizer) -> None:
    report = run(TableEngine(tokenizer, wrong_at_two, margin=9e-5), [3])
    assert report.is_lossless
    assert report.mismatches == []
    assert [(one.prompt, one.position) for one in report.near_ties] == [(2, 1)]


def test_float64_forgives_nothing(tokenizer: Tokenizer) -> None:
    report = run(TableEngine(tokenizer, wrong_at_two, dtype="float64", margin=1e-12), [3])
    assert not report.is_lossless
    assert report.near_ties == []


def test_many_near_ties_are_no_coincidence(tokenizer: Tokenizer) -> None:
    def answer(index: int, params: SamplingParams) -> list[int]:
        return [99] if params.num_speculative_tokens and index < 2 else TEXT

    report = run(TableEngine(tokenizer, answer, margin=0.0), [2])
    assert report.mismatches == []
    assert len(report.near_ties) == 4
    assert not report.is_lossless


def test_a_margin_that_is_no_number_is_no_near_tie(tokenizer: Tokenizer) -> None:
    report = run(TableEngine(tokenizer, wrong_at_two, margin=math.nan), [3])
    (mismatch,) = report.to_dict()["mismatches"]
    assert mismatch["margin"] is None


def test_a_broken_model_is_no_pass(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, [[emit(0, [], "error")]])
    with pytest.raises(RequestError, match=r"prompts\[0\]: the model's probabilities are not fin"):
        SelfTest(engine, [EncodedPrompt([5], None, "prompts[0]")], [1], 4).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("got", "position"),
    [([1, 2, 3], None), ([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)],
)
def test_first_difference(got: list[int], position: int | None) -> None:
    assert first_difference([1, 2, 3], got) == position
