"""What `make run` prints: texts, then the figures under their own names."""

from pathlib import Path

import pytest

from outrider.entrypoints.demo import main

FIGURES = (
    "tokens/s",
    "drafts",
    "draft tokens",
    "accepted tokens",
    "acceptance rate",
    "acceptance rate by position",
    "mean acceptance length = bound on the speed-up",
    "measured speed-up",
)


def test_texts_and_figures(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(model_dir), "--max-tokens", "4", "--dtype", "float64"]) == 0
    out = capsys.readouterr().out
    texts, _, table = out.partition("temperature 0, one prompt at a time")
    assert [f"prompt {number} of 3" in texts for number in (1, 2, 3)] == [True] * 3
    assert [name for name in FIGURES if f"│ {name} " in table] == list(FIGURES)
    assert "K = 0" in table
    assert "K = 3" in table
    assert "3 of 3 texts are token for token those of K = 0" in " ".join(table.split())


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
