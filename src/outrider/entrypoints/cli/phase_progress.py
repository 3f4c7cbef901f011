"""How far a command of several phases has come: a bar for each on a terminal, lines elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import TaskID

    OnProgress = Callable[[str, float, str], object]

# A line each time that another such part of a phase is done.
_NUM_LINES_PER_PHASE = 5


@contextmanager
def show_phases(stream: TextIO, *, is_quiet: bool = False) -> Iterator[OnProgress]:
    """Gives what is to be told of each phase: its name, the part that is done, and its figures.

    Args:
        stream: where it is shown.
        is_quiet: show nothing unless the stream is a terminal.
    """
    if not stream.isatty():
        yield _ignore if is_quiet else _Lines(stream).show
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=Console(file=stream),
    )
    with bar:
        yield _Bars(bar).show


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._num_written = 0

    def show(self, phase: str, fraction: float, figures: str) -> None:
        if phase != self._phase:
            self._phase, self._num_written = phase, 0
        if int(fraction * _NUM_LINES_PER_PHASE) > self._num_written:
            self._num_written = int(fraction * _NUM_LINES_PER_PHASE)
            self._stream.write(f"{phase}: {fraction:.0%}{figures and ', '}{figures}\n")
            self._stream.flush()


class _Bars:
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}

    def show(self, phase: str, fraction: float, figures: str) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=1.0, figures="")
        self._bar.update(self._tasks[phase], completed=fraction, figures=figures)


def _ignore(*_: object) -> None:
    pass
