"""`outrider train`: trains trunk and head from text files."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def train(
    *,
    config_file: Annotated[
        Path,
        typer.Option(
            "--config",
            metavar="FILE",
            help="The run in TOML, such as configs/bundled.toml; paths in it are relative to the "
            "working folder.",
        ),
    ],
) -> int:
    """Train a model and its multi-token-prediction head from text files.

    The output folder of the configuration gets log.jsonl, loss.png (redrawn at each evaluation),
    checkpoints, and at the end export/, a checkpoint that every other command takes as --model.

    Where the folder holds a checkpoint of the run, it goes on from there. An interrupt ends the run
    after the step at hand, with a checkpoint; a second one ends it at once.
    """
    from outrider.entrypoints.cli.train_progress import show_progress
    from outrider.training.config import TrainConfig
    from outrider.training.train import make_trainer, run_to_the_end

    config = TrainConfig.from_toml(config_file)
    with show_progress(sys.stderr) as listener:
        trainer = make_trainer(config, [listener])
        with _stop_signals(trainer.request_stop) as received:
            export_dir = run_to_the_end(trainer, config)
    if export_dir is None:
        sys.stderr.write(
            f"stopped at step {trainer.progress.step:,}, with a checkpoint in "
            f"{config.run.output_dir}; the same command goes on from there\n"
        )
        return 128 + received[0]
    typer.echo(str(export_dir))
    return 0


@contextmanager
def _stop_signals(request_stop: Callable[[], None]) -> Iterator[list[int]]:
    """Calls `request_stop` at the first signal and lists it; the next ones act as always."""
    received: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        received.append(number)
        for other, handler in previous.items():
            signal.signal(other, handler)
        request_stop()

    previous = {number: signal.signal(number, on_signal) for number in _STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
