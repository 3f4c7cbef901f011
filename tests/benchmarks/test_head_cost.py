"""The comparison of a trunk with a head and one without trains both alike."""

import json
from pathlib import Path

import pytest

from benchmarks.head_cost import app, compare, run_side, stage_config
from outrider.entrypoints.cli.run import run
from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.weights import has_mtp
from outrider.training.head_file import check_same_trunk
from tests.training.tiny_run import ROWS_PER_STEP, write_run


def test_both_sides_run_through_all_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [write_run(tmp_path, name) for name in ("first", "second")]
    names = ",".join(map(str, stages))
    budgets = f"{3 * ROWS_PER_STEP},{5 * ROWS_PER_STEP}"
    given = [str(tmp_path / "runs"), "--stages", names, "--tokens", budgets]
    # A side may have run before, in a process of its own.
    assert run(app, "head_cost", [*given, "--only", "trunk"]) == 0
    assert capsys.readouterr().out == ""
    assert run(app, "head_cost", given) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["stage"] for one in report["stages"]] == ["first", "second"]
    assert [one["num_tokens"] for one in report["stages"]] == [3 * ROWS_PER_STEP, 5 * ROWS_PER_STEP]
    for number, one in enumerate(report["stages"], 1):
        assert one["cost"] == pytest.approx(one["bits_per_byte"] / one["bits_per_byte_alone"] - 1)
        assert has_mtp(tmp_path / "runs" / f"head_{number}" / "export")
        assert not has_mtp(tmp_path / "runs" / f"trunk_{number}" / "export")
    folders = [tmp_path / "runs" / f"head_{number}" for number in (1, 2)]
    assert [one.cost for one in compare(stages, {"head": folders, "trunk": folders})] == [0, 0]


def test_a_detached_head_leaves_the_trunk_what_it_is_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_run(tmp_path, "first")
    assert run_side("head", [first], [2 * ROWS_PER_STEP], tmp_path / "start")
    start = tmp_path / "start" / "head_1" / "export"
    # The norm of all gradients together decides what is clipped, the head's among them.
    stage = write_run(tmp_path, "second", **{"optimizer.max_grad_norm": 1e9, "loss.mtp_weight": 2})
    given = ["--stages", str(stage), "--tokens", str(6 * ROWS_PER_STEP), "--start", str(start)]
    folder = tmp_path / "runs"
    assert run(app, "head_cost", [str(folder), *given, "--sides", "head,detached"]) == 0
    costs = json.loads(capsys.readouterr().out.splitlines()[-1])["stages"]
    assert [one["side"] for one in costs] == ["head", "detached"]
    assert costs[0]["cost"] != 0
    assert costs[1]["cost"] == 0
    for side in ("head", "detached"):
        config = stage_config(stage, folder, max_tokens=1, first_weights=start, side=side)
        assert config.run.init_from == start
    check_same_trunk(folder / "trunk_1" / "export", folder / "detached_1" / "export")
    with pytest.raises(CheckpointError):
        check_same_trunk(folder / "trunk_1" / "export", folder / "head_1" / "export")


def test_a_run_with_other_settings_is_no_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = write_run(tmp_path, "first")
    given = [str(tmp_path / "runs"), "--stages", str(stage), "--only", "trunk", "--tokens"]
    wrong = [*given, str(2 * ROWS_PER_STEP), "--start", str(tmp_path / "nowhere")]
    assert run(app, "head_cost", wrong) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run(app, "head_cost", [*given, str(2 * ROWS_PER_STEP)]) == 0
    assert run(app, "head_cost", [*given, str(2 * ROWS_PER_STEP)]) == 0
    assert run(app, "head_cost", [*given, str(3 * ROWS_PER_STEP)]) == 2
    assert "trunk_1: a run with other settings is in it: name another" in capsys.readouterr().err
    (tmp_path / "runs" / "trunk_1" / "settings.json").unlink()
    assert run(app, "head_cost", [*given, str(2 * ROWS_PER_STEP)]) == 2
    assert "trunk_1: a run with unknown settings is in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "many"], "--tokens: numbers such as "),
        (["--tokens", "1,2"], "--tokens: 2 budgets for 3 stages"),
        (["--only", "left"], "--only: one of head, detached, trunk is needed, got left"),
        (["--sides", "head,trunk"], "--sides: one of head, detached is needed, got trunk"),
        (["--stages", "no.toml", "--tokens", "1"], "no.toml"),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run(app, "head_cost", [str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
