"""Acceptance and speed beside our own engine: the reports, with something else in vLLM's place."""

import json
import signal
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import vllm_acceptance, vllm_process, vllm_speed
from benchmarks.vllm_acceptance import Acceptance, is_valid
from benchmarks.vllm_judge import SCHEMA
from benchmarks.vllm_process import VllmError, run_vllm
from benchmarks.vllm_settings import prompts_of
from outrider.entrypoints.cli.run import run
from outrider.entrypoints.llm import LLM
from outrider.errors import ConfigError

NUM_TOKENS = 4


class FakeVllm:
    """Says that of each window of K drafts two were kept, and what it was asked for.

    Its first text may be set; the others do not end.
    """

    def __init__(self) -> None:
        self.first_text = [7] * NUM_TOKENS
        self.tasks: list[dict[str, Any]] = []

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        self.tasks.append(task)
        drafting = task["engine"].get("speculative_config")
        one = {
            "token_ids": [self.first_text, *([7] * NUM_TOKENS for _ in task["prompts"][1:])],
            "seconds": 0.5,
            "num_drafts": 10 if drafting else 0,
            "num_draft_tokens": 30 if drafting else 0,
            "num_accepted_tokens": 20 if drafting else 0,
            "num_cached_tokens": 0,
        }
        return {
            "seconds_to_start": 3.0,
            "request_bytes": {"states": 2048, "all": 4096},
            "rounds": [one for _ in task["rounds"]],
        }


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = FakeVllm()
    for module in (vllm_acceptance, vllm_speed):
        monkeypatch.setattr(module, "run_vllm", fake)
    return fake


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[Acceptance]:
    """What our own engine brings: at temperature 0, and by each rule at 1."""
    kept = ((1.95, "standard", 0.0), (1.91, "standard", 1.0), (2.05, "block", 1.0))
    found = [
        Acceptance("outrider", rule, at, 100, 300, round(100 * number), 2, 1, 1)
        for number, rule, at in kept
    ]
    monkeypatch.setattr(vllm_acceptance, "measure_own", lambda llm, setting: found)
    return found


def test_acceptance(
    vllm: FakeVllm, own: list[Acceptance], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--num-prompts", "2", "--max-tokens", "8"]
    assert run(vllm_acceptance.app, "vllm_acceptance", given) == 0
    assert [
        (task["engine"]["speculative_config"]["rejection_sample_method"], len(task["rounds"]))
        for task in vllm.tasks
    ] == [("standard", 2), ("block", 1)]
    assert [one["temperature"] for one in vllm.tasks[0]["rounds"]] == [0.0, 1.0]
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["differences"] == pytest.approx([0.05, 0.09, -0.05])
    assert report["results"][0]["mean_acceptance_length"] == 3.0
    own[1] = replace(own[1], num_accepted_tokens=189)
    assert run(vllm_acceptance.app, "vllm_acceptance", given) == 1


def test_outputs_of_a_schema(
    vllm: FakeVllm, own: list[Acceptance], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--num-prompts", "2", "--max-tokens", "8", "--suite", "json", "--json-schema"]
    llm = LLM()
    text = llm.get_tokenizer().encode('{"name": "a", "size": 1, "tags": []}')
    vllm.first_text = [*text, min(llm.llm_engine.eos_token_ids)]
    own[2] = replace(own[2], num_accepted_tokens=10)
    assert run(vllm_acceptance.app, "vllm_acceptance", given) == 0
    assert all(one["schema"] == SCHEMA for task in vllm.tasks for one in task["rounds"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [report["results"][0][name] for name in ("num_finished", "num_valid")] == [1, 1]
    good, own[2] = own[2], replace(own[2], num_valid=0)
    assert run(vllm_acceptance.app, "vllm_acceptance", given) == 1
    # Texts of which none has ended say nothing of the schema.
    own[2], vllm.first_text = good, text
    assert run(vllm_acceptance.app, "vllm_acceptance", given) == 1


def test_our_own_side_of_the_acceptance() -> None:
    llm = LLM(dtype="float32", speculative_config={"method": "mtp", "num_speculative_tokens": 3})
    prompts = prompts_of(llm, ["json"], 2)
    setting = vllm_acceptance.Setting(
        prompts, 3, 12, None, llm.get_tokenizer(), llm.llm_engine.eos_token_ids
    )
    found = vllm_acceptance.measure_own(llm, setting)
    assert [(one.rule, one.temperature) for one in found] == [
        ("standard", 0.0),
        ("standard", 1.0),
        ("block", 1.0),
    ]
    for one in found:
        assert (one.num_texts, one.num_valid) == (2, None)
        assert 1 < one.mean_acceptance_length < 4
    text = llm.get_tokenizer().encode('{"name": "a", "size": 1, "tags": []}')
    end = min(setting.eos_token_ids)
    held = vllm_acceptance.Setting(
        prompts, 3, 12, SCHEMA, llm.get_tokenizer(), setting.eos_token_ids
    )
    assert held.outputs([[*text, end], [*text[:-1], end], text]) == {
        "num_texts": 3,
        "num_finished": 2,
        "num_valid": 1,
    }


def test_a_suite_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--suite: verse is none of code, prose, json"):
        prompts_of(LLM(), ["code", "verse"], 1)


def test_is_valid() -> None:
    assert is_valid('{"name": "a", "size": 1, "tags": []}', SCHEMA)
    assert not is_valid('{"name": "a", "size": 1}', SCHEMA)
    assert not is_valid('{"name": "a"', SCHEMA)


def test_speed(vllm: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--num-prompts", "1", "--max-tokens", str(NUM_TOKENS), "--repeats", "2"]
    assert run(vllm_speed.app, "vllm_speed", [*given, "--batch", "2"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["results"]
    assert [(one["engine"], one["num_workers"], one["k"]) for one in found] == [
        ("outrider", 1, 0),
        ("outrider", 1, 3),
        ("vLLM, TP1", 1, 0),
        ("vLLM, TP1", 1, 3),
        ("vLLM, TP2", 2, 0),
        ("vLLM, TP2", 2, 3),
    ]
    for one in found:
        assert len(one["tokens_per_s"]) == 2
        assert (one["mean_acceptance_length"] > 1) is (one["k"] > 0)
        assert 0 < one["state_bytes"] < one["request_bytes"]
    assert found[2]["tokens_per_s"] == [NUM_TOKENS / 0.5] * 2
    assert all(len(task["rounds"]) == 3 for task in vllm.tasks)


def test_speed_is_that_of_one_thread(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert run(vllm_speed.app, "vllm_speed", []) == 2
    assert "this process 2: set OMP_NUM_THREADS=1" in capsys.readouterr().err
    assert not vllm.tasks


def test_a_process_that_does_not_end_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Hanging(subprocess.Popen[bytes]):
        """Writes its result, and stays."""

        def __init__(self, arguments: list[str], **options: Any) -> None:
            super().__init__(["sh", "-c", 'echo {} > "$0"; sleep 60', arguments[-1]], **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Hanging)
    monkeypatch.setattr(vllm_process, "TIMEOUT_S", 0.5)
    with pytest.raises(VllmError, match="did not end within"):
        run_vllm({"engine": {}})
    assert [process.returncode for process in started] == [-signal.SIGKILL]
