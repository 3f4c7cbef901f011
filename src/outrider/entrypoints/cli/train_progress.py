"""What a person sees of a training run: a bar on a terminal, lines anywhere else."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress

if TYPE_CHECKING:
    from outrider.training.schedule import Progress
    from outrider.training.trainer import TrainingListener

logger = logging.getLogger("outrider")


class RemainingTime:
    """Foretells the end of a run from its pace since this process took it up."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def text(self, fraction: float, elapsed_s: float) -> str:
        """Returns the time that is left, as 1:02:03, or "-" while there is nothing to tell by.

        Args:
            fraction: of the budget that is used.
            elapsed_s: what the run has taken.
        """
        if self._first is None:
            self._first = (fraction, elapsed_s)
        first_fraction, first_s = self._first
        if fraction <= first_fraction:
            return "-"
        pace_s = (elapsed_s - first_s) / (fraction - first_fraction)
        return str(timedelta(seconds=round(max(0.0, 1.0 - fraction) * pace_s)))


class PlainProgress:
    """Writes a line for each record of the log."""

    def __init__(self) -> None:
        self._remaining = RemainingTime()

    def on_step(self, progress: "Progress", fraction: float, num_tokens_per_s: float) -> None:
        """Writes nothing."""

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Writes the record."""
        eta = self._remaining.text(record["budget_used"], record["elapsed_s"])
        logger.info("%s%s", describe(record), f", ETA {eta}" if record["kind"] == "train" else "")


class BarProgress:
    """Moves a bar; evaluations are lines above it."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._remaining = RemainingTime()
        self._task = bar.add_task("", total=1.0, step="-", speed="-", losses="", eta="-")

    def on_step(self, progress: "Progress", fraction: float, num_tokens_per_s: float) -> None:
        """Moves the bar."""
        self._bar.update(
            self._task,
            completed=min(1.0, fraction),
            step=f"{progress.step:,}",
            speed=f"{num_tokens_per_s:,.0f}",
            eta=self._remaining.text(fraction, progress.elapsed_s),
        )

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Shows the losses beside the bar, or an evaluation above it."""
        if record["kind"] == "train":
            self._bar.update(self._task, losses=_losses(record["trunk"], record["depths"]))
        else:
            logger.info("%s", describe(record))


@contextmanager
def show_progress(stream: TextIO) -> Iterator["TrainingListener"]:
    """Gives the listener that suits a stream: a bar where it is a terminal.

    Args:
        stream: where it is shown, the stream of the log as well.
    """
    if not stream.isatty():
        yield PlainProgress()
        return
    bar = RichProgress(
        TextColumn("step {task.fields[step]}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[losses]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TextColumn("ETA {task.fields[eta]}"),
        console=Console(file=stream),
        transient=True,
    )
    with bar, _log_above(bar):
        yield BarProgress(bar)


@contextmanager
def _log_above(bar: RichProgress) -> Iterator[None]:
    """Lets the lines of the log scroll above the bar, instead of through it."""

    class Above(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            bar.console.print(self.format(record), markup=False, highlight=False)

    shown = logger.handlers[:]
    above = Above()
    for handler in shown:
        logger.removeHandler(handler)
    logger.addHandler(above)
    try:
        yield
    finally:
        logger.removeHandler(above)
        for handler in shown:
            logger.addHandler(handler)


def describe(record: Mapping[str, Any]) -> str:
    """A record of the log in words."""
    if record["kind"] == "train":
        return (
            f"step {record['step']:,}: {record['num_tokens']:,} tokens, "
            f"{_losses(record['trunk'], record['depths'])}, {record['tokens_per_s']:,.0f} tokens/s"
        )
    parts = [
        f"step {record['step']:,}, held out: {record['bits_per_byte']:.3f} bits a byte",
        _losses(record["trunk_loss"], record["depth_losses"]),
    ]
    if record["agreement_per_depth"]:
        agreement = " ".join(f"{share:.2f}" for share in record["agreement_per_depth"])
        parts.append(f"agreement by depth {agreement}")
        parts.append(f"acceptance length {record['chained_acceptance_length']:.2f}")
    if record["num_rows_past_budget"]:
        parts.append(
            f"past the indexers' budget {record['loss_past_budget']:.3f} reading "
            f"{record['attended_share_past_budget']:.0%} of the keys, "
            f"{record['dense_loss_past_budget']:.3f} reading all"
        )
    return ", ".join(parts)


def _losses(trunk: float, depths: list[float]) -> str:
    head = " ".join(f"{loss:.3f}" for loss in depths)
    return f"loss {trunk:.3f}" + (f", by depth {head}" if depths else "")
