"""The program as a shell sees it: exit codes, streams, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider import __version__
from tests.entrypoints.plan_line import without_plan

OUTRIDER = [sys.executable, "-m", "outrider"]


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*OUTRIDER, *arguments], text=True, **{**pipes, **options})  # type: ignore[call-overload,no-any-return]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, without_plan(err)


def test_the_console_script(model_dir: Path) -> None:
    script = Path(sys.executable).with_name("outrider")
    command = [script, "generate", "--model", model_dir, "--max-tokens", "2", "--json"]
    done = subprocess.run(command, input="import os\n", capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["outputs"][0]["token_ids"]) == 2


def test_version_and_help() -> None:
    assert finish(start("--version")) == (0, f"outrider {__version__}\n", "")
    for arguments in (["--help"], ["generate", "--help"], ["check", "--help"]):
        code, out, err = finish(start(*arguments))
        assert (code, err) == (0, "")
        assert "Usage: outrider" in out


def test_an_error_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    code, out, err = finish(start("generate", "a", "--model", str(tmp_path)))
    assert (code, out) == (2, "")
    assert err == (
        f"error: {tmp_path}: neither model.safetensors nor model.safetensors.index.json is there\n"
    )


def test_an_empty_stdin_is_an_empty_prompt(model_dir: Path) -> None:
    code, out, err = finish(start("generate", "--model", str(model_dir)))
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: the prompt is empty")


def test_a_reader_that_leaves(model_dir: Path) -> None:
    process = start(
        "generate", "a", "--model", str(model_dir), "--max-tokens", "200", "--ignore-eos"
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert (code, err) == (1, "")


def test_a_terminal_without_unicode(model_dir: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    given = ("generate", "a", "--model", str(model_dir), "--max-tokens", "40", "--ignore-eos")
    code, out, _ = finish(start(*given, env=environment))
    assert code == 0
    # This text has bytes that are no UTF-8.
    assert "?" in out


def heed_interrupts() -> None:
    """A job that a shell began in the background ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_keyboard_interrupt() -> None:
    # As long as the bundled checkpoint's length allows: it takes many seconds.
    arguments = ("generate", "a", "--max-tokens", "4000", "--ignore-eos")
    process = start(*arguments, preexec_fn=heed_interrupts)
    assert process.stdout is not None
    # The first piece says that decoding is under way.
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    code, _, err = finish(process)
    assert (code, err) == (130, "")
    assert time.monotonic() - started < 60


def closed(redirection: str, *arguments: str) -> tuple[int, str, str]:
    """Runs the program from a shell that has closed or redirected one of its streams."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *OUTRIDER, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, without_plan(done.stderr)


def test_streams_that_are_closed(model_dir: Path) -> None:
    given = ("generate", "a", "--model", str(model_dir), "--max-tokens", "2")
    assert closed(">&-", *given)[0] == 0
    assert closed("2>&-", *given)[0] == 0
    assert closed("2>&-", *given, "--top-p", "2") == (2, "", "")
    code, out, err = closed("<&-", "generate", "-", "--model", str(model_dir))
    assert (code, out, err) == (2, "", "error: stdin: closed; there is no prompt to read\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_disk(model_dir: Path) -> None:
    for arguments in (["generate", "a", "--json", "--model", str(model_dir)], ["--version"]):
        code, _, err = closed(">/dev/full", *arguments)
        assert (code, err.splitlines()) == (2, ["error: the output: No space left on device"])
