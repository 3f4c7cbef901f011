"""The benchmark ends in one line of JSON that says what was measured, and where."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.decode import Measurement, app
from outrider.entrypoints.cli.run import run
from outrider.entrypoints.decode_run import DecodeSpeed
from tests.text_checkpoint import write_text_checkpoint


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_text_checkpoint(tmp_path / "tiny")


def test_the_last_line_is_the_report(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--num-prompts", "2", "--max-tokens", "4", "--repeats", "2", "--dtype", "float64"]
    given = ["--model", str(model_dir), "-k", "1,3", "--batch", "1,2", *small]
    assert run(app, "decode", given) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("speed-up" in line for line in table)
    report: dict[str, Any] = json.loads(last)
    assert [(one["batch_size"], one["k"]) for one in report["results"]] == [
        (batch_size, k) for batch_size in (1, 2) for k in (0, 1, 3)
    ]
    for one in report["results"]:
        speed = one["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert one["same_texts_as_k0"] == 2
        assert (one["num_drafts"] == 0) == (one["k"] == 0)
        assert one["speed_up"] == 1 if one["k"] == 0 else one["speed_up"] > 0
    assert list(report["provenance"]) == [
        "git_sha",
        "is_dirty",
        "versions",
        "argv",
        "device",
        "device_name",
        "dtype",
        "threads",
        "date",
    ]


def test_a_speed_up_compares_rounds_with_their_own_baseline() -> None:
    plain = Measurement(0, 1, [DecodeSpeed(10, 1.0), DecodeSpeed(10, 2.0)])
    drafted = Measurement(3, 1, [DecodeSpeed(10, 0.5), DecodeSpeed(10, 1.0)])
    assert drafted.tokens_per_s == [20, 10]
    assert drafted.speed_ups(plain) == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--batch", "0"], "--batch must be numbers from 1 such as 1 or 1,4,8, got '0'"),
        (["-k", "0"], "-k must be numbers from 1 to 8"),
        (["--temperature", "-1"], "temperature must be a finite number"),
        (["--rule", "none"], "rejection_sample_method must be standard, block or coupled"),
        (["--repeats", "0"], "'--repeats'"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    assert run(app, "decode", arguments) == 2
    assert reason in capsys.readouterr().err
