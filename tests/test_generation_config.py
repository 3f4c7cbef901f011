"""The checkpoint's sampling defaults and ends of sequence, each honoured or refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CheckpointError
from outrider.generation_config import GenerationConfig
from outrider.sampling_params import SamplingParams


def read(folder: Path, values: Any) -> GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return GenerationConfig.from_pretrained(folder)


def test_without_a_file_nothing_is_asked_for(tmp_path: Path) -> None:
    assert GenerationConfig.from_pretrained(tmp_path) == GenerationConfig((), SamplingParams())


def test_fields_become_defaults(tmp_path: Path) -> None:
    values = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "max_new_tokens": 33,
        "eos_token_id": [7, 5, 7],
        "repetition_penalty": 1.05,
        "transformers_version": "5.0",
    }
    assert read(tmp_path, values) == GenerationConfig(
        (7, 5),
        SamplingParams(
            temperature=0.6,
            top_p=0.95,
            top_k=20,
            min_p=0.1,
            max_tokens=33,
            repetition_penalty=1.05,
        ),
        max_new_tokens=33,
    )


@pytest.mark.parametrize(("value", "ids"), [(4, (4,)), (None, ()), ([], ())])
def test_end_of_sequence(tmp_path: Path, value: Any, ids: tuple[int, ...]) -> None:
    assert read(tmp_path, {"eos_token_id": value, "top_p": None}).eos_token_ids == ids


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"eos_token_id": "2"}, "eos_token_id must be a token id or a list of them, got '2'"),
        ({"eos_token_id": [True]}, "eos_token_id must be a token id or a list of them"),
        ({"eos_token_id": -1}, "eos_token_id must be a token id or a list of them, got -1"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number, greater than 0"),
        ({"top_p": 0}, "top_p must be a number in (0, 1], got 0"),
        ([], "must hold a JSON object"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, values: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(reason)) as raised:
        read(tmp_path, values)
    assert str(tmp_path / "generation_config.json") in str(raised.value)
