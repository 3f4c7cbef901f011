"""Where the tables of commands and benchmarks go."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

REPORT_WIDTH = 110


def report_console(width: int = REPORT_WIDTH) -> Console:
    """Stdout, as wide as the terminal.

    Args:
        width: columns in a file or a pipe, which has no width of its own.
    """
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = width
    return console
