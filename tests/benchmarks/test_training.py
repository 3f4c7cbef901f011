"""The training benchmark ends in one line of JSON, and compares only what does the same work."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import app, check_same_step, make_contenders
from outrider.entrypoints.cli.run import run
from outrider.errors import ConfigError
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.training.workers import Workers
from tests.text_checkpoint import write_text_checkpoint


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_text_checkpoint(tmp_path / "tiny")


def test_the_last_line_is_the_report(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--batch-size", "2", "--length", "20", "--depths", "2", "--rounds", "2"]
    given = ["--model", str(model_dir), "--no-compile", "--workers", "2", *small]
    assert run(app, "training", given) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("transformers" in line for line in table)
    report: dict[str, Any] = json.loads(last)
    assert [one["name"] for one in report["results"]] == ["transformers", "trunk", "trunk + 2"]
    assert report["compile"] is False
    for one in report["results"]:
        speed = one["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert one["tokens_per_cpu_s"] > 0
    assert report["results"][0]["ratio"] == report["results"][0]["cpu_ratio"] == 1.0


def test_trunks_that_differ_are_not_compared(model_dir: Path) -> None:
    config = dataclasses.replace(Qwen4ExpConfig.from_pretrained(model_dir))
    reference, ours, _ = make_contenders(config, 1, Workers(1))
    window = torch.randint(config.vocab_size, (1, 12))
    assert check_same_step(reference, ours, window) < 1e-3
    with torch.no_grad():
        ours.model.lm_head.weight += 0.1 * torch.randn_like(ours.model.lm_head.weight)  # type: ignore[union-attr,operator]
    with pytest.raises(ConfigError, match="so their times cannot be compared"):
        check_same_step(reference, ours, window)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--length", "1"], "'--length'"),
        (["--length", "100000"], "--length: 100000 is above"),
        (["--threads", "0"], "'--threads'"),
        (["--workers", "3"], "--workers: 3 cannot share 2 windows evenly"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    assert run(app, "training", ["--no-compile", *arguments]) == 2
    assert reason in capsys.readouterr().err
