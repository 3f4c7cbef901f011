"""`outrider serve`: what is wrong is told before a checkpoint is loaded, and a signal ends it."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import outrider.entrypoints.server
from outrider.config import ServerConfig
from outrider.entrypoints.cli import main
from tests.entrypoints.plan_line import without_plan


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--port", "99999"], "port must be an integer from 0 to 65535, got 99999"),
        (["--port", "http"], "'--port'"),
        (["--host", "0.0.0.0"], "host 0.0.0.0 can be reached from other machines"),
        (["--max-body-size", "x"], "max_body_size must be a number of bytes"),
        (["--allowed-host", "x:1"], "allowed_host must be a name or an address"),
        (["-k", "9"], "-k must be from 0 to 8, got 9"),
        (["--reasoning-parser", "r1"], "reasoning_parser must be qwen3, got 'r1'"),
        (["--tool-call-parser", "x"], "tool_call_parser must be qwen3_coder, got 'x'"),
        (["--enable-auto-tool-choice"], "needs a tool_call_parser, which may be qwen3_coder"),
        (["--max-num-seqs", "0"], "max_num_seqs must be an integer 1 or more"),
        (["--speculative-config", "{"], "no valid JSON"),
        (["--default-chat-template-kwargs", "{"], "kwargs: no valid JSON at column 2"),
        (["--default-chat-template-kwargs", "[]"], "kwargs must be a JSON object"),
        (
            ["--default-chat-template-kwargs", '{"enable_thnking": false}', "--port", "0"],
            "reads no variable 'enable_thnking'; those that it reads: enable_thinking",
        ),
        (
            ["--default-chat-template-kwargs", '{"enable_thinking": NaN}', "--port", "0"],
            "kwargs must be JSON, its numbers finite and its text valid Unicode",
        ),
        (
            ["--default-chat-template-kwargs", '{"enable_thinking": "\\ud800"}', "--port", "0"],
            "kwargs must be JSON, its numbers finite and its text valid Unicode",
        ),
        (["--default-chat-template-kwargs", '{"messages": []}', "--port", "0"], "'messages'"),
        (["one", "--model", "two"], "MODEL one and --model two: give one of the two"),
        (["nowhere"], "nowhere"),
        (["--prot", "1"], "No such option: --prot"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert reason in fails(capsys, *arguments)


@pytest.mark.parametrize("module", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    # The import that fails leaves a package of its own there.
    monkeypatch.setattr(outrider.entrypoints, "server", outrider.entrypoints.server)
    for name in list(sys.modules):
        if name.startswith("outrider.entrypoints.server"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    line = fails(capsys)
    assert line == f"error: the server needs {module}: pip install 'outrider[server]'\n"


class Recorder:
    """Takes the place of what runs the server."""

    def __init__(self) -> None:
        self.calls: list[tuple[ServerConfig, dict[str, Any]]] = []

    def __call__(self, config: ServerConfig, options: dict[str, Any]) -> None:
        self.calls.append((config, options))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    from outrider.entrypoints.server import run

    recorder = Recorder()
    monkeypatch.setattr(run, "serve", recorder)
    return recorder


def test_every_flag_of_the_server_has_its_effect(recorder: Recorder) -> None:
    arguments = {
        "--host": "0.0.0.0",
        "--port": "0",
        "--served-model-name": "x",
        "--api-key": "k",
        "--allowed-host": "box.example",
        "--max-num-queued": "7",
        "--max-body-size": "1MiB",
        "--shutdown-timeout-s": "3",
        "--reasoning-parser": "qwen3",
        "--tool-call-parser": "qwen3_coder",
        "--default-chat-template-kwargs": '{"enable_thinking": false}',
    }
    switches = ("--allow-unauthenticated", "--enable-auto-tool-choice")
    flat = [word for pair in arguments.items() for word in pair]
    assert main(["serve", *flat, "--served-model-name", "y", *switches]) == 0
    config, _ = recorder.calls[0]
    assert config == ServerConfig(
        host="0.0.0.0",
        port=0,
        served_model_name=("x", "y"),
        api_key="k",
        allow_unauthenticated=True,
        allowed_host=("box.example",),
        max_num_queued=7,
        max_body_size=1 << 20,
        shutdown_timeout_s=3,
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
        enable_auto_tool_choice=True,
        default_chat_template_kwargs={"enable_thinking": False},
    )
    flags = {f"--{name.replace('_', '-')}" for name in ServerConfig.__dataclass_fields__}
    assert {*arguments, *switches} == flags


def test_it_drafts_with_three_where_nothing_else_is_said(
    recorder: Recorder, model_dir: Path
) -> None:
    def options(*arguments: str) -> dict[str, Any]:
        assert main(["serve", *arguments]) == 0
        return recorder.calls[-1][1]

    mtp = {"method": "mtp", "num_speculative_tokens": 3}
    assert options()["speculative_config"] == mtp
    assert options(str(model_dir))["model"] == str(model_dir)
    assert options("--model", str(model_dir))["model"] == str(model_dir)
    assert options("-k", "2")["speculative_config"] == {**mtp, "num_speculative_tokens": 2}
    assert options("-k", "0")["speculative_config"] is None
    given = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert options("--speculative-config", given)["speculative_config"]["method"] == "ngram"
    assert options("--max-num-seqs", "3")["max_num_seqs"] == 3
    assert options("--seed", "5")["seed"] == 5


def get(url: str, body: object = None, key: str | None = None) -> Any:
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.loads(answer.read())


def test_the_program_serves_until_a_signal_and_ends_with_0(model_dir: Path) -> None:
    environment = {**os.environ, "OUTRIDER_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "outrider", "serve", str(model_dir), "--port", "0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        try:
            plan, first = program.stderr.readline(), program.stderr.readline()
            assert without_plan(plan) == ""
            match = re.fullmatch(r"serving tiny on (http://127\.0\.0\.1:\d+)\n", first)
            assert match is not None, first
            url = match[1]
            body = {"prompt": "a", "max_tokens": 3, "return_spec_decode_stats": True}
            answer = get(f"{url}/v1/completions", body, "secret")
            assert answer["model"] == "tiny"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(f"{url}/v1/models")
            program.send_signal(signal.SIGTERM)
            log = program.stderr.read()
            assert program.wait(20) == 0
        finally:
            program.kill()
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["status"] for line in lines] == [200, 401]
    assert "secret" not in log
