"""`outrider bench acceptance`: a table, a line of JSON and a picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.bundled import BUNDLED_SUITES
from outrider.entrypoints.cli import main
from tests.entrypoints.acceptance_keys import ROW_KEYS
from tests.entrypoints.plan_line import PLAN_LINE


class Bench:
    """The command on three prompts and the tiny checkpoint."""

    def __init__(self, model_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._model_dir, self._capsys = model_dir, capsys
        self.file = folder / "mine.txt"
        self.file.write_text("def f(x):\nimport os\na b a b\n")

    def __call__(self, *given: str, code: int = 0) -> tuple[list[str], str]:
        """Lines of stdout, and stderr without what the caches take."""
        small = ("--model", str(self._model_dir), "--max-model-len", "64", "--max-tokens", "8")
        prompts = () if "--suite" in given else ("--prompts", str(self.file))
        assert main(["bench", "acceptance", *small, *prompts, *given]) == code
        captured = self._capsys.readouterr()
        return captured.out.splitlines(), PLAN_LINE.sub("", captured.err)

    def rows(self, *given: str) -> list[dict[str, Any]]:
        """The rows of the JSON."""
        (line,), _ = self("--json", *given)
        rows: list[dict[str, Any]] = json.loads(line)["rows"]
        return rows


@pytest.fixture
def bench(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(model_dir, tmp_path, capsys)


def test_json(bench: Bench) -> None:
    lines, err = bench("-k", "1,2", "--temperature", "1", "--json", "--dtype", "float64")
    assert err == ""
    (line,) = lines
    report = json.loads(line)
    assert list(report) == ["rows", "intervals", "gains", "settings"]
    rows = report["rows"]
    assert len(rows) == len(report["intervals"]) == 2 * 2 * 3
    assert len(report["gains"]) == 2
    for row in rows:
        assert list(row) == ROW_KEYS
        assert (row["suite"], row["prompts"]) == ("mine", 3)
        low, high = row["ci95"]
        assert 1 <= low <= row["mean_acceptance_length"] <= high <= row["k"] + 1
        assert len(row["acceptance_rate_per_pos"]) == row["k"]
    assert report["settings"]["max_tokens"] == 8
    assert report["settings"]["dtype"] == "float64"


def test_a_table_and_a_last_line_of_json(bench: Bench) -> None:
    lines, err = bench("-k", "2", "--temperature", "0,1")
    *table, last = lines
    assert len(json.loads(last)["rows"]) == 2 * 2 * 3
    told = "\n".join(table)
    assert "95 % intervals over prompts; 8 tokens each, float32" in told
    cells = [[cell.strip() for cell in line.split("│")[1:6]] for line in table if "│" in line]
    assert cells == [
        ["mine", "2", "0", "any", "any"],
        ["mine", "2", "1", "sampled", "standard"],
        ["mine", "2", "1", "sampled", "block"],
        ["mine", "2", "1", "sampled", "coupled"],
        ["mine", "2", "1", "one-hot", "standard, block"],
        ["mine", "2", "1", "one-hot", "coupled"],
    ]
    assert "block against standard, mine, K = 2, temperature 1: " in told
    assert "on the same 3 prompts" in told
    assert [line.rpartition(": ")[0] for line in err.splitlines()] == [
        "mine, K = 2, temperature 0",
        "mine, K = 2, temperature 1, probabilistic drafts, standard",
        "mine, K = 2, temperature 1, probabilistic drafts, block",
        "mine, K = 2, temperature 1, probabilistic drafts, coupled",
        "mine, K = 2, temperature 1, greedy drafts, standard",
        "mine, K = 2, temperature 1, greedy drafts, coupled",
    ]


def test_lists_choose(bench: Bench) -> None:
    chosen = ("--rule", "coupled,block", "--draft-sample-method", "greedy", "--temperature", "1")
    rows = bench.rows(*chosen, "-k", "1", "--num-prompts", "1")
    assert [(row["rule"], row["draft_sample_method"]) for row in rows] == [
        ("coupled", "greedy"),
        ("block", "greedy"),
    ]
    # Nothing can be said of other prompts.
    assert [(row["prompts"], row["ci95"]) for row in rows] == [(1, None)] * 2


def test_the_engine_s_options_choose_where_no_list_does(bench: Bench) -> None:
    def ways(*given: str) -> set[tuple[int, str, str]]:
        rows = bench.rows("--temperature", "1", *given)
        return {(row["k"], row["rule"], row["draft_sample_method"]) for row in rows}

    config = {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "coupled",
        "draft_sample_method": "greedy",
    }
    text = json.dumps(config)
    assert ways("--speculative-config", text) == {(2, "coupled", "greedy")}
    assert ways("--speculative-config", text, "--rule", "block") == {(2, "block", "greedy")}
    standard = '{"rejection_sampler_config": {"enable_block_verify": false}}'
    assert ways("-k", "1", "--additional-config", standard) == {
        (1, "standard", "probabilistic"),
        (1, "standard", "greedy"),
    }
    lookup = '{"method": "ngram", "prompt_lookup_min": 1}'
    long = ("--max-tokens", "48", "--temperature", "0")
    assert ways("--speculative-config", lookup, "-k", "1", "--rule", "block,coupled", *long) == {
        (1, "block", "greedy"),
        (1, "coupled", "greedy"),
    }


def test_suites_are_spread_over(bench: Bench) -> None:
    name = next(iter(BUNDLED_SUITES))
    given = ("--suite", name, "--num-prompts", "2", "--max-model-len", "256")
    (row,) = bench.rows(*given, "-k", "1", "--temperature", "0", "--rule", "block",
                        "--draft-sample-method", "greedy")  # fmt: skip
    assert (row["suite"], row["prompts"]) == (name, 2)


def test_plot(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    few = ("-k", "1", "--temperature", "0", "--rule", "block", "--draft-sample-method", "greedy")
    bench.rows(*few, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_help_where_no_measurement_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "acceptance" in capsys.readouterr().out


BAD: dict[str, tuple[list[str], str]] = {
    "k": (["-k", "0"], "-k must be numbers from 1 to 8 such as 3, 1,2,4 or 1-8, got '0'"),
    "temperature": (["--temperature", "0,hot"], "--temperature must be numbers such as 0,0.7,1, "),
    "negative": (["--temperature", "-1"], "temperature must be a finite number, 0 or more"),
    "nan": (["--temperature", "nan"], "temperature must be a finite number, 0 or more"),
    "rule": (["--rule", "block,greedy"], "--rule must be some of standard, block, coupled, got 'g"),
    "drafts": (["--draft-sample-method", ""], "must be some of probabilistic, greedy, got ''"),
    "suite": (["--suite", "poems"], "--suite must be some of "),
    "both": (["--suite", "code", "--prompts", "x.txt"], "as --suite or as --prompts, not both"),
    "number": (["--num-prompts", "0"], "--num-prompts must be an integer 1 or more, got 0"),
    "max_tokens": (["--max-tokens", "2"], "--max-tokens must be 3 or more for a draft to fit, got"),
    "seed": (["--seed", "-1"], "--seed must be 0 or more, got -1"),
    "picture": (["--plot", "a.pdf"], "--plot writes PNG: give a file that ends in .png, got a.pdf"),
    "folder": (["--plot", "nowhere/a.png"], "--plot: nowhere is no folder"),
    "two k": (
        ["-k", "1-3", "--speculative-config", '{"num_speculative_tokens": 2}'],
        "-k asks for 3 drafts but --speculative-config for num_speculative_tokens 2",
    ),
    "lookup": (
        ["--speculative-config", '{"method": "ngram"}', "--draft-sample-method", "probabilistic"],
        'draft_sample_method "probabilistic" belongs to the method "mtp"',
    ),
}


@pytest.mark.parametrize(("given", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_input(bench: Bench, given: list[str], reason: str) -> None:
    out, err = bench(*given, code=2)
    assert out == []
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert reason in err


def test_without_matplotlib(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.entrypoints.acceptance_plot.find_spec", lambda name: None)
    _, err = bench("--plot", "a.png", code=2)
    assert err == "error: --plot needs matplotlib: pip install 'outrider[train]'\n"
