"""The benchmark of a domain tunes a copy of the head under each loss, and leaves no file behind."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.domain_tuning import app
from outrider.entrypoints.cli.run import run
from tests.text_checkpoint import write_text_checkpoint


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abcd":
        lines = [f"{name} says line {number} of its own.\n" for number in range(90)]
        (folder / f"{name}.h").write_text("".join(lines))
    return folder


def test_the_last_line_is_the_report(
    documents: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = str(write_text_checkpoint(tmp_path / "tiny"))
    options = ["--num-prompts", "8", "--epochs", "1", "--max-tokens", "8", "--losses", "ce,lk"]
    options += ["--temperatures", "0"]
    assert run(app, "domain", ["--model", model, "--documents", str(documents), *options]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["plan"]["loss"] for one in report["results"]] == ["ce", "lk"]
    ce, lk = report["results"]
    for one in (ce, lk):
        assert (one["num_prompts"], one["num_held_out"], len(one["changes"])) == (6, 2, 1)
        for change, gain in zip(one["changes"], one["relative_gains_fresh"], strict=True):
            fresh = change["before"]["mean_acceptance_length_fresh"]
            assert gain == pytest.approx(change["gain_fresh"] / fresh)
    # The same texts before tuning, and different heads after.
    assert ce["changes"][0]["before"] == lk["changes"][0]["before"]
    assert ce["tuning"]["last_losses"] != lk["tuning"]["last_losses"]
    assert not list(tmp_path.glob("outrider-*"))


def test_what_cannot_be_measured(documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*options: str) -> str:
        assert run(app, "domain", ["--documents", str(documents), *options]) == 2
        return capsys.readouterr().err

    assert "loss must be ce, kl or lk, got 'mse'" in fails("--losses", "ce,mse")
    assert "absent/tokenizer.json" in fails("--model", "absent")
    assert "gives 8 prompts in files *.h, and 9 are asked for" in fails("--num-prompts", "9")
    assert "no text in" in fails("--suffix", ".c")
