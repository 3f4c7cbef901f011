"""The benchmark of the server ends in one line of JSON, from servers that have really answered."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import Level, Stream, app, percentiles
from outrider.entrypoints.cli.run import run
from tests.text_checkpoint import write_text_checkpoint


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_text_checkpoint(tmp_path / "tiny")


def test_the_last_line_is_the_report(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--requests", "4", "--max-tokens", "6", "--rounds", "1"]
    assert run(app, "serving", ["--model", str(model_dir), "--streams", "1,3", *small]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("the server under load" in line for line in table)
    report: dict[str, Any] = json.loads(last)
    assert [(one["num_streams"], one["k"]) for one in report["results"]] == [
        (1, 0),
        (1, 3),
        (3, 0),
        (3, 3),
    ]
    for one in report["results"]:
        assert one["num_requests"] == 4
        assert one["tokens_per_s"]["median"] > 0
        for name in ("time_to_first_token_s", "inter_token_latency_s"):
            assert 0 < one[name]["p50"] <= one[name]["p99"]


def test_a_gap_is_shared_by_the_tokens_of_its_chunk() -> None:
    level = Level(3, 1)
    level.add_round([Stream(0.5, [(0.3, 3), (0.2, 1)], [1, 2, 3, 4, 5])], 2.0)
    assert level.tokens_per_s == [2.5]
    assert level.first_token_s == [0.5]
    assert level.inter_token_s == pytest.approx([0.1, 0.1, 0.1, 0.2])
    assert level.chunk_gaps_s == [0.3, 0.2]


def test_percentiles_are_interpolated() -> None:
    assert percentiles([1.0]) is None
    assert percentiles([0.0, 100.0]) == pytest.approx({"p50": 50.0, "p99": 99.0})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--streams", "0"], "--streams must be numbers from 1 such as 1 or 1,8,32, got '0'"),
        (["--requests", "2", "--streams", "3"], "--requests: 2 prompts cannot fill 3 streams"),
        (["--model", "/nowhere"], "the server did not start: "),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, "serving", arguments) == 2
    assert reason in capsys.readouterr().err
