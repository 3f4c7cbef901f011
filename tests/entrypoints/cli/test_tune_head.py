"""`outrider tune-head`: a table or a line of JSON, and one line for what cannot be done."""

import json
import re
from pathlib import Path

import pytest

from outrider.entrypoints.cli import main
from outrider.entrypoints.cli.prompt_sources import read_sourced_prompts
from tests.entrypoints.plan_line import without_plan

QUICK = ("--max-model-len", "64", "--max-tokens", "4", "--epochs", "1", "--temperatures", "0")


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "def f(x):", "source": "a.py"},
        {"prompt": "import os", "source": "b.py"},
        {"prompt": "class A:", "source": "a.py"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def arguments(model_dir: Path, prompts_file: str, output: Path, *more: str) -> list[str]:
    given = ("--model", str(model_dir), "--prompts", prompts_file, "--output", str(output))
    return ["tune-head", *given, *QUICK, *more]


def test_json_is_one_line_and_nothing_else(
    model_dir: Path, prompts_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("-k", "2", "--held-out", "0.5", "--loss", "ce", "--json")
    assert main(arguments(model_dir, prompts_file, tmp_path / "out", *given)) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report == json.loads((tmp_path / "out" / "tune_head.json").read_text())
    assert report["num_prompts"] + report["num_held_out"] == 3
    (change,) = report["changes"]
    assert change["before"]["k"] == change["after"]["k"] == 2
    assert len(change["after"]["acceptance_rate_per_pos"]) == 2
    assert len(report["tuning"]["last_losses"]) == 2
    # Untrained, cross entropy is near the logarithm of 4,096 ids or above it; KL would not be.
    assert report["tuning"]["first_losses"][0] > 7


def test_a_table_says_what_was_gained_and_what_stayed(
    model_dir: Path, prompts_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main(arguments(model_dir, prompts_file, output)) == 0
    captured = capsys.readouterr()
    for word in ("before", "after", "gain", "length, fresh", "held-out prompts"):
        assert word in captured.out
    assert f"are byte for byte those of {model_dir}" in captured.out
    assert captured.out.endswith(f"{output}\n")
    figures = {
        "measuring before": r"temperature 0: \d\.\d\d",
        "writing": r"\d+ tokens",
        "tuning": r"loss by depth [\d. ]+, [\d,]+ tokens/s",
        "measuring after": r"temperature 0: \d\.\d\d",
    }
    for phase, figure in figures.items():
        assert re.search(rf"^{phase}: 100%, {figure}$", captured.err, re.MULTILINE), phase


BAD = {
    "loss": (("--loss", "mse"), "loss must be ce, kl or lk, got 'mse'"),
    "lambda": (("--lk-lambda", "1.5"), "lk_lambda must be from 0 to 1, got 1.5"),
    "temperatures": (("--temperatures", "0,x"), "temperatures must be numbers such as 0,0.7,1"),
    "temperature below": (("--temperatures", "-1"), "temperatures must be numbers"),
    "max tokens": (("--max-tokens", "2"), "max_tokens must be an integer 3 or more, got 2"),
    "epochs": (("--epochs", "0"), "num_epochs must be an integer 1 or more, got 0"),
    "samples": (("--samples", "0"), "num_samples must be an integer 1 or more, got 0"),
    "batch size": (("--batch-size", "0"), "batch_size must be an integer 1 or more, got 0"),
    "minutes": (("--max-minutes", "nan"), "max_minutes must be a number above 0, got nan"),
    "rate": (("--learning-rate", "0"), "learning_rate must be a number above 0, got 0.0"),
    "share": (("--held-out", "1"), "held_out_share must be above 0 and below 1, got 1.0"),
    "seed": (("--seed", "-1"), "seed must be an integer 0 or more, got -1"),
    "compile": (
        ("--compile", "--dtype", "float64"),
        "compile: native kernels are for float32 on the CPU, got float64 on cpu",
    ),
    "k zero": (("-k", "0"), "-k must be from 1 to 8, got 0"),
    "k above": (("-k", "9"), "-k must be from 0 to 8, got 9"),
    "method": (
        ("--speculative-config", '{"method": "ngram"}'),
        'speculative_config.method must be "mtp"',
    ),
    "model": (("--model", "absent"), "absent: no such checkpoint directory"),
    "prompts": (("--prompts", "absent.jsonl"), "absent.jsonl: cannot be read"),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line(
    model_dir: Path,
    prompts_file: str,
    tmp_path: Path,
    given: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    assert main(arguments(model_dir, prompts_file, output, *given)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    told = without_plan(captured.err)
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1
    assert not output.exists()


def test_a_folder_that_is_not_empty_is_left_alone(
    model_dir: Path, prompts_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model_dir, prompts_file, tmp_path)) == 2
    assert "exists and is not empty; name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def sources(path: Path) -> list[str]:
    return [source for _, source in read_sourced_prompts(path)]


def test_sources_of_prompts(prompts_file: str, tmp_path: Path) -> None:
    assert sources(Path(prompts_file)) == ["a.py", "b.py", "a.py"]
    text = tmp_path / "prompts.txt"
    text.write_text("a\n\nb\na\n")
    assert sources(text) == ["a", "b", "a"]
    lines = tmp_path / "plain.jsonl"
    # The same prompt is of one source, whatever else its line says.
    lines.write_text('{"prompt": "a"}\n{"id": 1, "prompt":"a", "source": null}\n{"prompt": "b"}\n')
    first, second, third = sources(lines)
    assert first == second != third
    # A source need not be a text.
    lines.write_text(
        '{"prompt": "a", "source": 3}\n{"prompt": "b", "source": 3}\n{"prompt": "c"}\n'
    )
    first, second, third = sources(lines)
    assert first == second != third
