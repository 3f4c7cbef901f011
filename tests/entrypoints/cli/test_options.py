"""Flags follow the configuration classes, and lists of K are read or refused by name."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

from outrider.config import NESTED_OPTIONS, EngineConfig
from outrider.entrypoints.cli.check import check
from outrider.entrypoints.cli.generate import generate
from outrider.entrypoints.cli.options import parse_k_list, speculative_options
from outrider.errors import ConfigError
from outrider.sampling_params import SamplingParams


def test_every_field_has_a_flag() -> None:
    engine = {NESTED_OPTIONS.get(f.name, f.name) for f in fields(EngineConfig)} - {"seed"}
    sampling = {f.name for f in fields(SamplingParams)} - {"detokenize", "output_kind"}
    of_generate = set(inspect.signature(generate).parameters)
    assert of_generate == engine | sampling | {"prompts", "prompts_file", "is_json"}
    assert engine <= set(inspect.signature(check).parameters)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("1-8", list(range(1, 9))), ("5, 1,2-3", [1, 2, 3, 5]), ("2-2,2", [2])],
)
def test_k_list(text: str, numbers: list[int]) -> None:
    assert parse_k_list(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "9", "1-9", "3-1", "a", "1,,2", "-1", "1.5", "1-2-3"])
def test_bad_k_list(text: str) -> None:
    with pytest.raises(ConfigError, match="-k must be numbers from 1 to 8 such as"):
        parse_k_list(text)


@pytest.mark.parametrize(
    ("k", "text", "expected"),
    [
        (None, None, None),
        (0, None, None),
        (2, None, {"method": "mtp", "num_speculative_tokens": 2}),
        (None, '{"method": "mtp"}', {"method": "mtp"}),
        (4, '{"method": "mtp"}', {"method": "mtp", "num_speculative_tokens": 4}),
        (4, '{"num_speculative_tokens": 4}', {"num_speculative_tokens": 4}),
    ],
)
def test_k_and_speculative_config(k: Any, text: Any, expected: Any) -> None:
    assert speculative_options(k, text) == expected


@pytest.mark.parametrize(
    ("k", "text", "reason"),
    [
        (9, None, "-k must be from 0 to 8, got 9"),
        (-1, None, "-k must be from 0 to 8, got -1"),
        (3, '{"num_speculative_tokens": 2}', "-k asks for 3 drafts but --speculative-config for"),
        (0, '{"num_speculative_tokens": 2}', "-k asks for 0 drafts but --speculative-config for"),
        (None, "{'method': 'mtp'}", "--speculative-config: no valid JSON at column 2: write dou"),
        (None, "[1]", "--speculative-config must be a JSON object"),
    ],
)
def test_bad_k_and_speculative_config(k: Any, text: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        speculative_options(k, text)
