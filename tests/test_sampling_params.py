"""Every parameter out of its range is named, with the range."""

import re
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from outrider.errors import RequestError
from outrider.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
TEMPERATURE = "temperature must be a finite number, 0 or more, got "
TOP_P = "top_p must be a number in (0, 1], got "
TOP_K = "top_k must be an integer -1 or more (0 or -1 is all), got "
MIN_P = "min_p must be a number in [0, 1], got "
MAX_TOKENS = "max_tokens must be an integer 1 or more, got "
SEED = "seed must be an integer from -9223372036854775808 to 9223372036854775807, got "
NUMBER = "num_speculative_tokens must be an integer from 0 to 8, got "

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
]


@pytest.mark.parametrize(("name", "value", "phrase"), WRONG, ids=lambda value: str(value)[:30])
def test_wrong_values_are_named(name: str, value: Any, phrase: str) -> None:
    with pytest.raises(RequestError, match="^" + re.escape(phrase)) as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.seed, params.ignore_eos) == (16, None, False)
    assert params.stop_token_ids == ()
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


def test_minus_one_is_no_seed_and_none_no_stop_ids() -> None:
    params = SamplingParams(seed=-1, stop_token_ids=None)  # type: ignore[arg-type]
    assert params == SamplingParams()


def test_is_frozen_and_hashable() -> None:
    params = SamplingParams(stop_token_ids=[3])
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop_token_ids=(3,)))
