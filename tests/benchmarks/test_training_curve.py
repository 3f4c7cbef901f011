"""The benchmark of a training run measures what the run has kept, in order."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training_curve import app, find_exports, gains_per_hour
from outrider.entrypoints.cli.run import run
from outrider.entrypoints.ratio_estimate import RatioEstimate
from outrider.training.config import TrainConfig
from outrider.training.train import make_trainer, run_to_the_end
from tests.training.tiny_run import NUM_STEPS, ROWS_PER_STEP, write_run


def length(*windows: tuple[int, int]) -> RatioEstimate | None:
    """Of prompts with so many accepted tokens in so many windows."""
    return RatioEstimate.over([part for part, _ in windows], [whole for _, whole in windows])


def test_a_gain_is_of_an_hour() -> None:
    lengths = [length((2, 1)), length((22, 10)), length((23, 10)), length((0, 0)), length((24, 10))]
    gains = gains_per_hour([0, 0.5, 2.5, 3, 4], lengths, k=3)
    assert [gain is None for gain in gains] == [True, False, False, True, True]
    assert [gain.per_hour for gain in gains if gain] == [pytest.approx(0.4), pytest.approx(0.05)]
    assert {gain.ci95 for gain in gains if gain} == {None}  # of a single prompt


def test_a_gain_is_of_the_same_prompts() -> None:
    # Prompts that differ widely gain alike: the interval is that of the gains.
    before, after = length((10, 10), (30, 10)), length((12, 10), (34, 10))
    gain = gains_per_hour([1, 3], [before, after], k=3)[1]
    assert gain is not None
    assert gain.per_hour == pytest.approx(0.15)
    # Of 2 prompts, gains 0.2 and 0.4 over 2 hours: a standard error of 0.1 over those 2.
    assert gain.ci95 == pytest.approx((0.15 - 1.959964 * 0.05, 0.15 + 1.959964 * 0.05))


def test_the_last_line_is_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Every fifth step passes a multiple; of 12 there are two, and the end.
    config_file = write_run(
        tmp_path,
        **{"run.export_every_tokens": 5 * ROWS_PER_STEP, "run.log_every_steps": 3},
    )
    config = TrainConfig.from_toml(config_file)
    run_to_the_end(make_trainer(config), config)
    output_dir = config.run.output_dir
    exports = find_exports(output_dir)
    assert [weights.step for weights in exports] == [5, 10, NUM_STEPS]
    assert [weights.num_tokens for weights in exports] == [
        ROWS_PER_STEP * weights.step for weights in exports
    ]
    assert exports[-1].folder == output_dir / "export"
    # The run goes on with a larger budget, and its last export is still that of its first end.
    with (output_dir / "log.jsonl").open("a") as log:
        record = {"kind": "train", "step": 15, "num_tokens": 15 * ROWS_PER_STEP}
        log.write(json.dumps({**record, "elapsed_s": 60.0, "budget_used": 0.7}) + "\n")
    assert find_exports(output_dir) == exports
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("row 1 of\nrow 2 of\n")
    picture = tmp_path / "curve.png"
    options = ["--prompts", str(prompts), "-k", "2", "--max-tokens", "8", "--plot", str(picture)]
    start = ["--start", str(exports[0].folder)]
    assert run(app, "training_curve", [str(output_dir), *options, *start]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["step"] for one in report["points"]] == [0, 5, 10, NUM_STEPS]
    hours = [one["hours"] for one in report["points"]]
    assert hours == sorted(hours)
    assert hours[0] == 0 < hours[1]
    for one in report["points"]:
        assert 1 <= one["mean_acceptance_length"] <= 3
    # The first row is the same weights as the second.
    first, second = report["points"][:2]
    assert first["gain"] is None
    assert second["gain"] == {"per_hour": 0, "ci95": [0, 0]}
    assert first["mean_acceptance_length"] == second["mean_acceptance_length"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, "training_curve", [str(tmp_path)]) == 2
    assert "log.jsonl: cannot be read" in capsys.readouterr().err
    record = {"kind": "train", "step": 1, "num_tokens": 4, "elapsed_s": 1.0, "budget_used": 1.0}
    (tmp_path / "log.jsonl").write_text(json.dumps(record) + "\n")
    assert run(app, "training_curve", [str(tmp_path)]) == 2
    assert "no weights to measure" in capsys.readouterr().err


def test_its_name() -> None:
    command = [sys.executable, "-m", "benchmarks.training_curve", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "python -m benchmarks.training_curve" in result.stdout
