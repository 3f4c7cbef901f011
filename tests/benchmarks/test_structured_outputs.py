"""The benchmark of masked drafting ends in one line of JSON."""

import json
from pathlib import Path

import pytest

from benchmarks.structured_outputs import app
from outrider.entrypoints.cli.run import run
from tests.text_checkpoint import write_text_checkpoint


def test_the_last_line_is_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = write_text_checkpoint(tmp_path / "tiny")
    given = ["--model", str(model_dir), "-k", "2", "--num-prompts", "1", "--max-tokens", "4"]
    assert run(app, "structured_outputs", given) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("unmasked" in line for line in table)
    report = json.loads(last)
    assert [one["is_masked"] for one in report["results"]] == [True, False] * 4
    for one in report["results"]:
        assert one["num_valid"] == one["num_finished"]
        assert one["num_drafts"] > 0
