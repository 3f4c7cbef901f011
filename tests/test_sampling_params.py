"""Every parameter out of its range is named, with the range."""

import re
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from outrider.errors import RequestError, shown
from outrider.sampling_params import RequestOutputKind, SamplingParams

NAN, INF = float("nan"), float("inf")
TEMPERATURE = "temperature must be a finite number, 0 or more, got "
TOP_P = "top_p must be a number in (0, 1], got "
TOP_K = "top_k must be an integer -1 or more (0 or -1 is all), got "
MIN_P = "min_p must be a number in [0, 1], got "
MAX_TOKENS = "max_tokens must be an integer 1 or more, got "
SEED = "seed must be an integer from -9223372036854775808 to 9223372036854775807, got "
NUMBER = "num_speculative_tokens must be an integer from 0 to 8, got "

N = "n must be an integer from 1 to 16384, got "
PRESENCE = "presence_penalty must be a number in [-2, 2], got "
FREQUENCY = "frequency_penalty must be a number in [-2, 2], got "
REPETITION = "repetition_penalty must be a finite number, greater than 0, got "
MIN_TOKENS = "min_tokens must be an integer 0 or more, got "
BIAS = "logit_bias[7] must be a number in [-100, 100], got "
BIAS_ID = "a token id in logit_bias must be an integer 0 or more, got "
LARGEST = "9223372036854775807"
# Deeper than Python prints.
NESTED: list[object] = []
for _ in range(100_000):
    NESTED = [NESTED]

WRONG: list[tuple[str, object, str]] = [
    ("temperature", -0.1, TEMPERATURE + "-0.1"),
    ("temperature", NAN, TEMPERATURE + "nan"),
    ("temperature", INF, TEMPERATURE + "inf"),
    ("temperature", -INF, TEMPERATURE + "-inf"),
    ("temperature", 10**400, TEMPERATURE + "1000"),
    ("temperature", "1", TEMPERATURE + "'1'"),
    ("temperature", True, TEMPERATURE + "True"),
    ("temperature", None, TEMPERATURE + "None"),
    ("top_p", 0, TOP_P + "0"),
    ("top_p", -0.5, TOP_P + "-0.5"),
    ("top_p", 1.0001, TOP_P + "1.0001"),
    ("top_p", NAN, TOP_P + "nan"),
    ("top_p", "0.9", TOP_P + "'0.9'"),
    ("top_k", -2, TOP_K + "-2"),
    ("top_k", 1.0, TOP_K + "1.0"),
    ("top_k", True, TOP_K + "True"),
    ("min_p", -0.1, MIN_P + "-0.1"),
    ("min_p", 1.1, MIN_P + "1.1"),
    ("min_p", NAN, MIN_P + "nan"),
    ("max_tokens", 0, MAX_TOKENS + "0"),
    ("max_tokens", -1, MAX_TOKENS + "-1"),
    ("max_tokens", 2.5, MAX_TOKENS + "2.5"),
    ("seed", 1.0, SEED + "1.0"),
    ("seed", "7", SEED + "'7'"),
    ("seed", True, SEED + "True"),
    ("seed", 1 << 63, SEED + "9223372036854775808"),
    ("seed", -(1 << 63) - 1, SEED + "-9223372036854775809"),
    ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
    ("stop_token_ids", 3, "stop_token_ids must be a list of token ids, got 3"),
    ("stop_token_ids", "12", "stop_token_ids must be a list of token ids, got '12'"),
    ("stop_token_ids", [1, -1], "stop_token_ids[1] must be an integer 0 or more, got -1"),
    ("stop_token_ids", [True], "stop_token_ids[0] must be an integer 0 or more, got True"),
    ("num_speculative_tokens", -1, NUMBER + "-1"),
    ("num_speculative_tokens", 9, NUMBER + "9"),
    ("num_speculative_tokens", "3", NUMBER + "'3'"),
    ("num_speculative_tokens", True, NUMBER + "True"),
    (
        "rejection_sample_method",
        "blok",
        "rejection_sample_method must be standard, block or coupled, got 'blok'",
    ),
    ("rejection_sample_method", ["block"], "rejection_sample_method must be standard, block or"),
    ("n", 0, N + "0"),
    ("n", -1, N + "-1"),
    ("n", True, N + "True"),
    ("n", 1.0, N + "1.0"),
    ("n", None, N + "None"),
    ("n", 1 << 63, N + "9223372036854775808"),
    ("n", 10**5000, N + "a int too long to print"),
    ("presence_penalty", -2.1, PRESENCE + "-2.1"),
    ("presence_penalty", NAN, PRESENCE + "nan"),
    ("presence_penalty", 10**400, PRESENCE + "1000"),
    ("presence_penalty", True, PRESENCE + "True"),
    ("presence_penalty", None, PRESENCE + "None"),
    ("frequency_penalty", 2.1, FREQUENCY + "2.1"),
    ("frequency_penalty", -INF, FREQUENCY + "-inf"),
    ("frequency_penalty", "1", FREQUENCY + "'1'"),
    ("repetition_penalty", 0, REPETITION + "0"),
    ("repetition_penalty", -1, REPETITION + "-1"),
    ("repetition_penalty", NAN, REPETITION + "nan"),
    ("repetition_penalty", 1e400, REPETITION + "inf"),
    ("repetition_penalty", True, REPETITION + "True"),
    ("repetition_penalty", None, REPETITION + "None"),
    ("stop", 5, "stop must be a list of texts, got 5"),
    ("stop", [NESTED], "stop[0] must be a text of one character or more, got a list nested too"),
    ("stop", b"a", "stop must be a list of texts, got b'a'"),
    ("stop", "", "stop[0] must be a text of one character or more, got ''"),
    ("stop", ["a", ""], "stop[1] must be a text of one character or more, got ''"),
    ("stop", [None], "stop[0] must be a text of one character or more, got None"),
    ("stop", "\ud83c", "stop[0] is no valid Unicode text: '\\ud83c' at character 0"),
    ("stop", ["a", "b\udc80"], "stop[1] is no valid Unicode text: '\\udc80' at character 1"),
    ("bad_words", "word", "bad_words must be a list of texts, got 'word'"),
    ("bad_words", [""], "bad_words[0] must be a text of one character or more, got ''"),
    ("bad_words", [7], "bad_words[0] must be a text of one character or more, got 7"),
    ("bad_words", ["a\ud800"], "bad_words[0] is no valid Unicode text: '\\ud800' at character 1"),
    ("stop_token_ids", [1 << 63], f"stop_token_ids[0] must be an integer from 0 to {LARGEST}, "),
    ("include_stop_str_in_output", 0, "include_stop_str_in_output must be true or false, got 0"),
    ("detokenize", None, "detokenize must be true or false, got None"),
    ("skip_special_tokens", "no", "skip_special_tokens must be true or false, got 'no'"),
    ("min_tokens", -1, MIN_TOKENS + "-1"),
    ("min_tokens", True, MIN_TOKENS + "True"),
    ("min_tokens", NAN, MIN_TOKENS + "nan"),
    ("min_tokens", None, MIN_TOKENS + "None"),
    ("min_tokens", 10**5000, f"min_tokens must be an integer from 0 to {LARGEST}, got a int too"),
    ("min_tokens", 17, "min_tokens must not be more than max_tokens (16), got 17"),
    ("max_tokens", 1 << 63, f"max_tokens must be an integer from 1 to {LARGEST}, got 92233"),
    ("logprobs", -2, "logprobs must be an integer -1 or more (-1 is the whole vocabulary), got -2"),
    ("logprobs", True, "logprobs must be an integer -1 or more (-1 is the whole vocabulary), got"),
    ("logprobs", 5.0, "logprobs must be an integer -1 or more (-1 is the whole vocabulary), got 5"),
    ("prompt_logprobs", [], "prompt_logprobs must be an integer -1 or more (-1 is the whole vocab"),
    ("logit_bias", [], "logit_bias must map token ids to numbers in [-100, 100], got []"),
    ("logit_bias", {7: 100.5}, BIAS + "100.5"),
    ("logit_bias", {7: NAN}, BIAS + "nan"),
    ("logit_bias", {7: 10**400}, BIAS + "1000"),
    ("logit_bias", {7: True}, BIAS + "True"),
    ("logit_bias", {"7": None}, BIAS + "None"),
    ("logit_bias", {-1: 1}, BIAS_ID + "-1"),
    ("logit_bias", {True: 1}, BIAS_ID + "True"),
    ("logit_bias", {"a": 1}, BIAS_ID + "'a'"),
    (
        "logit_bias",
        {1 << 63: 1},
        f"a token id in logit_bias must be an integer from 0 to {LARGEST}",
    ),
    ("logit_bias", {7: 1, "7": 2}, "logit_bias gives token id 7 twice"),
    ("output_kind", "all", "output_kind must be cumulative, delta or final_only, got 'all'"),
    ("output_kind", None, "output_kind must be cumulative, delta or final_only, got None"),
]


@pytest.mark.parametrize(("name", "value", "phrase"), WRONG, ids=lambda value: shown(value)[:30])
def test_wrong_values_are_named(name: str, value: Any, phrase: str) -> None:
    with pytest.raises(RequestError, match="^" + re.escape(phrase)) as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match=r"^stop needs the text of the output: leave detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.seed, params.ignore_eos) == (16, None, False)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        0,
        0,
        1,
    )
    assert (params.n, params.min_tokens, params.logprobs, params.prompt_logprobs) == (
        1,
        0,
        None,
        None,
    )
    assert (params.logit_bias, params.detokenize, params.skip_special_tokens) == (None, True, True)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.include_stop_str_in_output is False
    assert params.num_speculative_tokens is None
    assert params.rejection_sample_method is None
    assert not params.is_greedy


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 10**6},
        {"min_p": 0},
        {"min_p": 1},
        {"max_tokens": None},
        {"seed": 0},
        {"seed": -(1 << 63)},
        {"seed": (1 << 63) - 1},
        {"n": 16384},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1e-9},
        {"min_tokens": 16},
        {"logprobs": -1},
        {"prompt_logprobs": 0},
        {"logit_bias": {0: -100, 5: 100}},
        {"logit_bias": {}},
        {"stop": ("\x00", "\ufffd", "🎉")},
        {"bad_words": (" ",)},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 8},
        {"rejection_sample_method": "coupled"},
    ],
    ids=str,
)
def test_edges_of_the_ranges(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for name, value in values.items():
        assert getattr(params, name) == value


def test_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-6) == SamplingParams(temperature=0.0)
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int32(4),  # type: ignore[arg-type]
        seed=np.int64(9),  # type: ignore[arg-type]
        stop_token_ids=list(np.array([1, 2])),
    )
    assert params == SamplingParams(temperature=0.5, top_k=4, seed=9, stop_token_ids=(1, 2))
    assert {type(params.top_k), type(params.seed), *map(type, params.stop_token_ids)} == {int}
    assert type(params.temperature) is float


def test_minus_one_is_no_seed_and_none_no_stops() -> None:
    params = SamplingParams(seed=-1, stop_token_ids=None, stop=None, bad_words=None)
    assert params == SamplingParams()
    assert params == SamplingParams(stop=[], stop_token_ids=[], bad_words=[])


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="ab") == SamplingParams(stop=["ab"])
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_ids_of_a_bias_may_be_digits_as_in_json() -> None:
    assert SamplingParams(logit_bias={"12": 1}).logit_bias == {12: 1.0}  # type: ignore[dict-item]


def test_kinds_of_output_have_names() -> None:
    for kind in RequestOutputKind:
        assert SamplingParams(output_kind=kind.value).output_kind is kind  # type: ignore[arg-type]


def test_is_frozen_and_hashable() -> None:
    params = SamplingParams(stop_token_ids=[3])
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop_token_ids=(3,)))
