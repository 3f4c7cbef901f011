"""The command `outrider train`: a run that is stopped, killed or out of disk goes on to the bit."""

import io
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from outrider.entrypoints.cli import main
from outrider.entrypoints.cli.train import _stop_signals
from outrider.entrypoints.cli.train_progress import RemainingTime, describe, show_progress
from outrider.training.run_log import read_log
from outrider.training.schedule import Progress
from tests.training.tiny_run import NUM_STEPS, ROWS_PER_STEP, write_run

TRAIN_RECORD = {
    "kind": "train",
    "step": 20,
    "num_tokens": 10_240,
    "elapsed_s": 12.5,
    "budget_used": 0.25,
    "trunk": 5.4321,
    "depths": [5.5, 5.6],
    "tokens_per_s": 1234.5,
}
EVAL_RECORD = {
    "kind": "eval",
    "step": 20,
    "budget_used": 0.25,
    "elapsed_s": 12.5,
    "bits_per_byte": 1.5,
    "trunk_loss": 3.0,
    "depth_losses": [3.1, 3.2],
    "agreement_per_depth": [0.7, 0.5],
    "chained_acceptance_length": 2.25,
    "num_rows_past_budget": 10,
    "loss_past_budget": 2.9,
    "dense_loss_past_budget": 2.8,
    "attended_share_past_budget": 0.66,
}


def start(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "outrider", "train", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(process: subprocess.Popen[str], output_dir: Path, step: int) -> None:
    """Waits until the run has a checkpoint at a step or after it."""
    deadline = time.monotonic() + 240
    while True:
        newest = max((output_dir / "checkpoints").glob("step-*"), default=None)
        if newest is not None and int(newest.name.removeprefix("step-")) >= step:
            return
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"no checkpoint at step {step} in four minutes"
        time.sleep(0.005)


def test_a_run_interrupted_and_then_killed_ends_as_if_it_had_not_been(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # So many that a busy machine does not miss the middle of the run.
    num_steps_in_all = 40
    options = {
        "schedule.max_tokens": num_steps_in_all * ROWS_PER_STEP,
        "run.eval_every_steps": 20,
    }
    config = write_run(tmp_path, "parts", **options)
    output_dir = tmp_path / "parts"
    process = start(config)
    try:
        wait_for_step(process, output_dir, 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130, err
    last_line = err.splitlines()[-1]
    assert last_line.startswith("stopped at step ")
    assert last_line.endswith("the same command goes on from there")
    num_steps = int(last_line.split()[3].rstrip(","))
    assert (output_dir / "checkpoints" / f"step-{num_steps:08d}").exists()
    assert num_steps < num_steps_in_all - 1
    process = start(config)
    try:
        wait_for_step(process, output_dir, num_steps + 1)
    finally:
        process.kill()
        process.communicate()
    assert not (output_dir / "export").exists()
    assert main(["train", "--config", str(config)]) == 0
    assert "going on from " in capsys.readouterr().err
    assert main(["train", "--config", str(write_run(tmp_path, "whole", **options))]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'whole' / 'export'}\n"
    files = [f"checkpoints/step-{num_steps_in_all:08d}/{name}" for name in ("model", "optimizer")]
    for file in (*files, "export/model"):
        whole, parts = (
            load_file(tmp_path / name / f"{file}.safetensors") for name in ("whole", "parts")
        )
        assert whole.keys() == parts.keys()
        assert all(whole[name].equal(parts[name]) for name in whole), file
    steps = [
        [(record["kind"], record["step"]) for record in read_log(tmp_path / name / "log.jsonl")]
        for name in ("whole", "parts")
    ]
    assert steps[0] == steps[1]
    assert len(set(steps[0])) == len(steps[0]), "the log tells of each step once"


def test_the_engine_takes_what_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path)
    assert main(["train", "--config", str(config)]) == 0
    captured = capsys.readouterr()
    model_dir = captured.out.strip()
    lines = captured.err.splitlines()
    assert lines[0].startswith("train: 1 documents, ")
    assert sum(line.startswith("step ") and "tokens/s, ETA " in line for line in lines) == NUM_STEPS
    assert sum(" held out: " in line and " bits a byte" in line for line in lines) == 3
    arguments = ["--model", model_dir, "--max-tokens", "6", "-k", "3"]
    assert main(["generate", "row 1", *arguments]) == 0


def test_a_full_disk_ends_the_run_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for the weights and none for the moments of the optimiser, which are twice as large.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        assert main(["train", "--config", str(config)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith(f"error: {tmp_path}/out/checkpoints/step-00000001: the checkpoint could ")
    assert "File too large" in err
    assert not list((tmp_path / "out" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "run.toml: cannot be read (No such file or directory)"),
        ("[run\n", "run.toml: not TOML ("),
        ("[run]\nmodle_dir = 'm'\n", "unknown key 'modle_dir', did you mean 'model_dir'?"),
        (
            "[run]\nmodel_dir = 'm'\noutput_dir = 'o'\n[schedule]\nmax_tokens = 5\n",
            "m: no such checkpoint directory",
        ),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("run.toml").write_text(text)
    assert main(["train", "--config", "run.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.fixture
def interrupts() -> Iterator[None]:
    """An interrupt acts as in a terminal, also where the tests run as a background job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_second_signal_acts_as_always(interrupts: None) -> None:
    calls: list[None] = []
    with _stop_signals(lambda: calls.append(None)) as received:
        signal.raise_signal(signal.SIGTERM)
        assert (received, len(calls)) == ([signal.SIGTERM], 1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(calls) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_remaining_time_is_told_by_the_pace_of_this_process() -> None:
    remaining = RemainingTime()
    assert remaining.text(0.5, 1000.0) == "-"  # taken up in the middle
    assert remaining.text(0.6, 1100.0) == "0:06:40"
    assert remaining.text(0.7, 1300.0) == "0:07:30"
    assert remaining.text(1.2, 1500.0) == "0:00:00"


def test_records_in_words() -> None:
    assert describe(TRAIN_RECORD) == (
        "step 20: 10,240 tokens, loss 5.432, by depth 5.500 5.600, 1,234 tokens/s"
    )
    assert describe(EVAL_RECORD) == (
        "step 20, held out: 1.500 bits a byte, loss 3.000, by depth 3.100 3.200, agreement by "
        "depth 0.70 0.50, acceptance length 2.25, past the indexers' budget 2.900 reading 66% of "
        "the keys, 2.800 reading all"
    )
    alone = {"depth_losses": [], "agreement_per_depth": [], "num_rows_past_budget": 0}
    assert describe({**EVAL_RECORD, **alone}) == (
        "step 20, held out: 1.500 bits a byte, loss 3.000"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_with_evaluations_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    logger = logging.getLogger("outrider")
    handlers = logger.handlers[:]
    with show_progress(terminal) as listener:
        for step in (10, 20):
            progress = Progress(step=step, num_tokens=512 * step, elapsed_s=float(step))
            listener.on_step(progress, step / 100, 1234.5)
        listener.on_record(TRAIN_RECORD)
        logger.setLevel(logging.INFO)
        listener.on_record(EVAL_RECORD)
        logger.warning("a line of the log")
    shown = terminal.getvalue()
    assert "step 20" in shown
    assert "loss 5.432, by depth 5.500 5.600" in shown
    assert "1,234 tokens/s" in shown
    assert "ETA 0:01:20" in shown
    assert "held out: 1.500 bits a byte" in shown
    assert "a line of the log" in shown
    assert logger.handlers == handlers
