"""The reports of `outrider bench acceptance` become tables of Markdown."""

from pathlib import Path

import pytest

from benchmarks.acceptance_table import app, gains_table, lengths_table, read_report
from outrider.entrypoints.cli.app import main
from outrider.entrypoints.cli.run import run


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


def test_what_is_one_stands_in_one_line(report_file: Path) -> None:
    report = read_report(report_file)
    lines = lengths_table([report]).splitlines()
    assert lines[0] == "| suite | T | drafts, rule | K = 1 | K = 3 |"
    ways = [line.split(" | ")[1:3] for line in lines[2:]]
    assert ways == [
        ["0", "any"],
        ["1", "sampled, standard"],
        ["1", "sampled, block"],
        ["1", "sampled, coupled"],
        ["1", "one-hot, standard or block"],
        ["1", "one-hot, coupled"],
    ]
    (row,) = (
        row
        for row in report["rows"]
        if (row["k"], row["temperature"], row["rule"]) == (3, 1.0, "block")
        and row["draft_sample_method"] == "probabilistic"
    )
    assert f"/ {row['mean_acceptance_length']:.2f} |" in lines[4]
    gains = gains_table([report]).splitlines()[2:]
    assert [line.split(" | ")[1:4] for line in gains] == [["1", "1", "2"], ["1", "3", "2"]]


def test_several_reports_are_one_page(
    report_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, "acceptance_table", [str(report_file), str(report_file)]) == 0
    tables = capsys.readouterr().out.split("\n\n")
    assert [len(table.splitlines()) for table in tables] == [8, 8, 6]


@pytest.mark.parametrize("content", [None, b"", b"{}\n", b"[1]\n", b"\xff\n", b"{"])
def test_what_is_no_report_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    assert run(app, "acceptance_table", [str(path)]) == 2
    assert capsys.readouterr().err == (f"error: {path}: no report of outrider bench acceptance\n")
