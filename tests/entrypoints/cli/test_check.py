"""`outrider check`: passes on a sound engine, and fails by name on one that is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.engine import LLMEngine
from outrider.entrypoints.cli import main
from outrider.outputs import StepOutput
from tests.entrypoints.plan_line import PLAN_LINE

KEYS = ["prompts", "k", "mismatches", "near_ties", "mean_acceptance_length"]


def arguments(model_dir: Path, *more: str) -> list[str]:
    return [
        "check",
        "--model",
        str(model_dir),
        "--max-model-len",
        "128",
        "--max-tokens",
        "5",
        *more,
    ]


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("def f(x):\nimport os\nclass A:\n")
    return str(path)


def wrong_at(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """Makes drafting change the token at a position of each output."""
    step = LLMEngine.step
    emitted: dict[str, int] = {}

    def wrong_step(engine: LLMEngine) -> list[StepOutput]:
        outputs = step(engine)
        for output in outputs:
            start = emitted.get(output.request_id, 0)
            emitted[output.request_id] = start + len(output.new_token_ids)
            is_drafting = output.num_draft_tokens > 0
            if is_drafting and start <= position < emitted[output.request_id]:
                output.new_token_ids[position - start] ^= 1
        return outputs

    monkeypatch.setattr(LLMEngine, "step", wrong_step)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_passes(
    model_dir: Path, prompts_file: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--prompts", prompts_file, "-k", "1,3-4", "--dtype", dtype)
    assert main(arguments(model_dir, *given, "--json")) == 0
    captured = capsys.readouterr()
    assert PLAN_LINE.fullmatch(captured.err), "what the caches take, and nothing else"
    report = json.loads(captured.out)
    assert list(report) == KEYS
    assert report == {
        "prompts": 3,
        "k": [1, 3, 4],
        "mismatches": [],
        "near_ties": [],
        "mean_acceptance_length": report["mean_acceptance_length"],
    }
    assert 1 <= report["mean_acceptance_length"] <= 5


def test_the_number_of_drafts_may_come_with_how_to_draft(
    model_dir: Path, prompts_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 5}'
    given = ("--prompts", prompts_file, "--speculative-config", config, "--json")
    assert main(arguments(model_dir, *given)) == 0
    assert json.loads(capsys.readouterr().out)["k"] == [5]


def test_at_least_a_hundred_bundled_prompts_by_default(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--max-tokens", "1", "-k", "1", "--json")
    assert main(["check", "--model", str(model_dir), *given]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] >= 100


def test_names_the_first_position_that_differs(
    model_dir: Path,
    prompts_file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong_at(monkeypatch, 3)
    given = ("--prompts", prompts_file, "-k", "2", "--dtype", "float64")
    assert main(arguments(model_dir, *given, "--json", "--num-prompts", "2")) == 1
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["near_ties"] == []
    places = [(one["rule"], one["prompt"], one["position"]) for one in report["mismatches"]]
    assert places == [(rule, prompt, 3) for rule in ("greedy", "coupled") for prompt in (0, 1)]
    for one in report["mismatches"]:
        assert list(one) == ["prompt", "position", "margin", "rule", "k"]
        assert (one["k"], one["margin"] > 0) == (2, True)


def test_a_table_for_people(
    model_dir: Path,
    prompts_file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("--prompts", prompts_file, "-k", "2", "--dtype", "float64")
    assert main(arguments(model_dir, *given)) == 0
    out = capsys.readouterr().out
    assert "3 prompts" in out
    assert "lossless: 30 tokens compared, 0 near-ties" in out
    wrong_at(monkeypatch, 2)
    assert main(arguments(model_dir, *given)) == 1
    out = capsys.readouterr().out
    assert "mismatch: prompt 2, token 2, margin " in out
    assert "NOT lossless: 30 tokens compared, 6 mismatches" in out
