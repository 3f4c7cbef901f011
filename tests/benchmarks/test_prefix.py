"""The benchmark of the prefix cache ends in one line of JSON, and both engines say the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prefix import NUM_ANSWER_TOKENS, NUM_NEW_TOKENS, app
from outrider.entrypoints.cli.run import run
from tests.text_checkpoint import write_text_checkpoint


def test_the_last_line_is_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_text_checkpoint(tmp_path / "tiny"))
    options = ["--lengths", "16,21", "--repeats", "2", "--dtype", "float64", "--block-size", "8"]
    assert run(app, "prefix", ["--model", model, "-k", "2", *options]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["num_prompt_tokens"] for one in report["results"]] == [16, 21]
    for one in report["results"]:
        num_said = one["num_prompt_tokens"] + NUM_ANSWER_TOKENS
        assert one["num_next_prompt_tokens"] == num_said + NUM_NEW_TOKENS
        assert one["num_cached_tokens"] == (num_said - 1) // 8 * 8
        assert one["num_different_rounds"] == 0
        assert one["speed_up"] > 0
        for kind in ("off", "cold", "warm", "off_next"):
            times = one[f"{kind}_ms"]
            assert 0 < times["min"] <= times["median"] <= times["max"]


def test_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_text_checkpoint(tmp_path / "tiny"))
    assert run(app, "prefix", ["--model", model, "--no-enable-prefix-caching"]) == 2
    assert "has no prefix cache" in capsys.readouterr().err
    assert run(app, "prefix", ["--model", model, "--lengths", "1,x"]) == 2
    assert "--lengths must be numbers" in capsys.readouterr().err
