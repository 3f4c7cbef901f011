"""The log of a run: what a resume drops, and what it makes of a line that was cut short."""

import json
from pathlib import Path

import pytest

from outrider.errors import OutriderError
from outrider.training.run_log import RunLog, read_log


def record(step: int) -> dict[str, object]:
    return {"kind": "train", "step": step, "num_tokens": 10 * step, "depths": [1.0, 2.0]}


def test_a_resume_drops_what_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path, 0)
    for step in (1, 2, 3, 4):
        log.write(record(step))
    with path.open("a") as file:
        file.write('{"kind": "tra')  # what a crash left
    resumed = RunLog(path, 2)
    resumed.write(record(3))
    assert read_log(path) == [record(1), record(2), record(3)]
    assert {file.name for file in tmp_path.iterdir()} == {"log.jsonl"}


def test_numbers_are_cut_to_five_digits(tmp_path: Path) -> None:
    written = RunLog(tmp_path / "log.jsonl", 0).write({"a": 1.23456789, "b": [1e-9 / 3], "c": None})
    assert written == {"a": 1.2346, "b": [3.3333e-10], "c": None}
    assert json.loads((tmp_path / "log.jsonl").read_text()) == written


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(record(1)) + "\nnothing\n")
    with pytest.raises(OutriderError, match=r"log\.jsonl: line 2 is no record of a training run"):
        RunLog(path, 5)
    path.write_text('[1, 2]\n{"a": 1}\n')
    with pytest.raises(OutriderError, match="line 1 is no record"):
        RunLog(path, 5)
    with pytest.raises(OutriderError, match=r"log\.jsonl: the log could not be written \(No such"):
        RunLog(tmp_path / "absent" / "log.jsonl", 0).write(record(1))
