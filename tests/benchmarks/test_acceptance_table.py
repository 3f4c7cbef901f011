"""The reports of `outrider bench acceptance` become tables of Markdown."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance_table import Report, app
from outrider.entrypoints.cli.app import main
from outrider.entrypoints.cli.run import run
from outrider.errors import ConfigError


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.json"
    prompts = path.with_name("prompts.txt")
    prompts.write_text("def one():\ndef two():\n")
    options = ["--prompts", str(prompts), "-k", "1,3", "--temperature", "0,1", "--max-tokens", "8"]
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["bench", "acceptance", *options, "--json"]) == 0
    return path


@pytest.fixture
def report(report_file: Path) -> Report:
    return Report.from_file(report_file)


def test_what_is_one_stands_in_one_line(report: Report) -> None:
    lengths, intervals, gains = report.tables(3)
    lines = lengths.splitlines()
    assert lines[0] == "| suite | T | drafts | rule | K = 1 | K = 3 |"
    ways = [line.split(" | ")[1:4] for line in lines[2:]]
    assert ways == [
        ["0", "any", "any"],
        ["1", "sampled", "standard"],
        ["1", "sampled", "block"],
        ["1", "sampled", "coupled"],
        ["1", "one-hot", "standard, block"],
        ["1", "one-hot", "coupled"],
    ]
    assert [line.split(" | ")[1:4] for line in intervals.splitlines()[4:]] == ways
    assert [line.split(" | ")[1:4] for line in gains.splitlines()[2:]] == [
        ["1", "1", "2"],
        ["1", "3", "2"],
    ]


def test_the_figures_are_those_of_the_report(report: Report) -> None:
    (row, intervals), *_ = (
        (row, intervals)
        for row, intervals in zip(report.rows, report.intervals, strict=True)
        if (row.k, row.temperature, row.rule) == (1, 1.0, "block")
        and row.draft_sample_method == "probabilistic"
    )
    # Figures that no other row has, in every place.
    row = replace(
        row,
        mean_acceptance_length=1.23,
        ci95=(1.11, 1.35),
        mean_acceptance_length_fresh=1.45,
        acceptance_rate_per_pos=[0.67],
        repeated_share=0.89,
    )
    intervals = replace(intervals, mean_acceptance_length_fresh=(1.33, 1.57))
    gain = replace(report.gains[0], gain=0.123, ci95=(-0.01, 0.2))
    lengths, of_k, gains = Report([row], [intervals], [gain], {}).tables(1)
    assert lengths.splitlines()[2] == "| prompts | 1 | sampled | block | 1.45 / 1.23 |"
    assert of_k.splitlines()[0] == "K = 1, 95 % intervals over prompts:"
    assert of_k.splitlines()[4] == (
        "| prompts | 1 | sampled | block | 2 | 1.45 (1.33 to 1.57) | 1.23 (1.11 to 1.35) | 0.67 | "
        "89% |"
    )
    assert gains.splitlines()[2] == "| prompts | 1 | 1 | 2 | +0.123 (-0.010 to +0.200) |"


def test_several_reports_are_one_page(
    report_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(report_file.read_text().replace('"suite": "prompts"', '"suite": "other"'))
    assert run(app, "acceptance_table", [str(report_file), str(other), "-k", "1"]) == 0
    settings, *tables = capsys.readouterr().out.split("\n\n")
    assert settings.startswith("model bundled, max_tokens 8, seed 0, dtype float32")
    assert [len(table.splitlines()) for table in tables] == [14, 1, 14, 6]


def test_without_gains_there_is_no_table_of_them(report: Report) -> None:
    assert len(replace(report, gains=[]).tables(1)) == 2


def test_what_does_not_go_together(
    report_file: Path, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, "acceptance_table", [str(report_file), str(report_file)]) == 2
    assert capsys.readouterr().err == (
        "error: prompts at K = 1 and temperature 0 is in the reports twice\n"
    )
    assert run(app, "acceptance_table", [str(report_file), "-k", "2"]) == 2
    assert capsys.readouterr().err == "error: -k must be one of 1, 3, got 2\n"
    other = replace(report, settings={**report.settings, "max_tokens": 9})
    with pytest.raises(ConfigError, match="reports of different max_tokens: 8 and 9"):
        Report.joined([report, other])


def without_a_share(report: dict[str, Any]) -> None:
    del report["rows"][0]["repeated_share"]


def with_a_word(report: dict[str, Any]) -> None:
    report["rows"][0]["mean_acceptance_length"] = "long"


def with_fewer_intervals(report: dict[str, Any]) -> None:
    report["intervals"].pop()


def without_rows(report: dict[str, Any]) -> None:
    report["rows"] = report["intervals"] = []


BROKEN: dict[str, Callable[[dict[str, Any]], None] | bytes | None] = {
    "absent": None,
    "empty": b"",
    "no rows named": b"{}\n",
    "a list": b"[1]\n",
    "no text": b"\xff\n",
    "no JSON": b"{",
    "deep": b"[" * 100_000,
    "a row without a figure": without_a_share,
    "a word": with_a_word,
    "rows without intervals": with_fewer_intervals,
    "no rows": without_rows,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_report_is_told_in_one_line(
    report_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | Callable[[dict[str, Any]], None] | None,
) -> None:
    path = tmp_path / "some.json"
    if callable(content):
        report = json.loads(report_file.read_text())
        content(report)
        content = json.dumps(report).encode()
    if content is not None:
        path.write_bytes(content)
    assert run(app, "acceptance_table", [str(path)]) == 2
    assert capsys.readouterr().err == f"error: {path}: no report of outrider bench acceptance\n"
