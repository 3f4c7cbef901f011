"""How drafts are made and judged, from the command line: what is asked for is what runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.decode import app
from outrider.entrypoints.cli import main
from outrider.entrypoints.cli.run import run
from outrider.spec_decode import rejection_sampler
from tests.models.tiny_checkpoint import Tensors, edit_tensors

MTP = '{"method":"mtp","num_speculative_tokens":3,"enforce_eager":true}'
NGRAM = '{"method":"ngram","prompt_lookup_max":3,"prompt_lookup_min":1}'
GRAPHS = '{"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[8,16,32,64]}'
PROMPT = "a b a b a b a b"


def block_verify(is_enabled: bool) -> list[str]:
    enabled = json.dumps({"rejection_sampler_config": {"enable_block_verify": is_enabled}})
    return ["--additional-config", enabled]


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each rule was applied."""
    calls: dict[str, int] = {}

    def counted(name: str, verify: Callable[..., Any]) -> Callable[..., Any]:
        calls[name] = 0

        def wrapper(*arguments: Any) -> Any:
            calls[name] += 1
            return verify(*arguments)

        return wrapper

    for name in ("standard_verify", "block_verify", "coupled_verify"):
        wrapper = counted(name, getattr(rejection_sampler, name))
        monkeypatch.setattr(rejection_sampler, name, wrapper)
    return calls


def generate(
    model_dir: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, Any]:
    """The figures of eight tokens."""
    model = ("--model", str(model_dir), "--max-tokens", "8", "--ignore-eos", "--json")
    assert main(["generate", PROMPT, *model, *arguments]) == 0
    stats: dict[str, Any] = json.loads(capsys.readouterr().out)["stats"]
    return stats


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_rule_of_the_rejection_sampler(
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    rules: dict[str, int],
    k: int,
    is_enabled: bool,
) -> None:
    """Sampled, the rule asked for judges every window, and no other does."""
    drafting = json.loads(MTP) | {"num_speculative_tokens": k}
    flags = ("--speculative-config", json.dumps(drafting), *block_verify(is_enabled))
    stats = generate(model_dir, capsys, "--temperature", "1", "--seed", "1", *flags)
    assert stats["num_drafts"] > 0
    assert len(stats["num_accepted_tokens_per_pos"]) == k
    name = "block_verify" if is_enabled else "standard_verify"
    assert rules[name] > stats["num_drafts"]
    assert sum(rules.values()) == rules[name]


@pytest.fixture
def repeating_model_dir(own_model_dir: Path) -> Path:
    """A checkpoint that says but two tokens, so that every text repeats itself."""

    def edit(tensors: Tensors) -> None:
        head = tensors["lm_head.weight"]
        direction = head[40].clone()
        head.zero_()
        head[40], head[41] = direction, -direction

    edit_tensors(own_model_dir, edit)
    return own_model_dir


def test_look_up(repeating_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted = generate(repeating_model_dir, capsys, "--speculative-config", NGRAM, "-k", "2")
    assert drafted["num_drafts"] > 0
    assert len(drafted["num_accepted_tokens_per_pos"]) == 2


def test_look_up_is_checked_and_measured(
    repeating_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\ndef f(x):\n")
    given = ["--model", str(repeating_model_dir), "--prompts", str(prompts)]
    given += ["--speculative-config", NGRAM, "-k", "1,3", "--max-tokens", "8", "--dtype", "float64"]
    assert main(["check", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mismatches"] == []
    assert run(app, "decode", [*given, "--repeats", "1", "--num-prompts", "2"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["k"] for one in report["results"]] == [0, 1, 3]
    assert [one["num_drafts"] > 0 for one in report["results"]] == [False, True, True]
    assert all(one["same_texts_as_k0"] == 2 for one in report["results"])


REFUSED = {
    "graphs": (
        ["--compilation-config", GRAPHS],
        "compilation_config.cudagraph_mode FULL_DECODE_ONLY cannot be honoured: this build runs "
        'every step eagerly; write "NONE" or leave compilation_config out',
    ),
    "look-up of mtp": (
        ["--speculative-config", '{"method":"mtp","prompt_lookup_max":3}'],
        'speculative_config.prompt_lookup_max belongs to the method "ngram"',
    ),
    "lengths of a look-up": (
        ["--speculative-config", '{"method":"ngram","prompt_lookup_max":2,"prompt_lookup_min":3}'],
        "speculative_config.prompt_lookup_min must not be more than prompt_lookup_max (2), got 3",
    ),
    "two numbers of drafts": (
        ["--speculative-config", '{"method":"ngram","num_speculative_tokens":2}', "-k", "3"],
        "-k asks for 3 drafts but --speculative-config for num_speculative_tokens 2: give one of "
        "the two",
    ),
}


@pytest.mark.parametrize(("arguments", "reason"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("command", [["generate", "a"], ["check"]])
def test_refused_at_the_start(
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert main([*command, "--model", str(model_dir), *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"error: {reason}\n")


def test_no_graphs(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ('{"cudagraph_mode":"NONE"}', "{}"):
        assert generate(model_dir, capsys, "--compilation-config", given)["num_drafts"] > 0
