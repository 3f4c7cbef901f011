"""How a program ends: its exit code, and errors as one line."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import typer

from outrider.errors import OutriderError, error_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXIT_BROKEN_PIPE = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def make_app(name: str) -> typer.Typer:
    """A program without commands yet."""
    return typer.Typer(
        name=name,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Paragraphs of a docstring are wrapped to the terminal.
        rich_markup_mode="markdown",
    )


def make_group(name: str, purpose: str) -> typer.Typer:
    """A command whose parts are commands; alone it shows them, and ends as an error does.

    Args:
        name: of the command.
        purpose: of all of them, a sentence for the help.
    """
    group = make_app(name)

    @group.callback(invoke_without_command=True, help=purpose)
    def choose(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit(EXIT_ERROR)

    return group


def run(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a program and returns its exit code.

    Wrong input is told in one line on stderr, with exit code 2.

    Args:
        app: its commands return exit codes.
        name: of the program, for its help.
        arguments: without the name of the program; None is those of the process.
    """
    # A stream that was closed before the program began is None; what is written there is dropped.
    sys.stdout = sys.stdout or _null_stream()
    sys.stderr = sys.stderr or _null_stream()
    for stream in (sys.stdout, sys.stderr):
        _replace_errors(stream)
    try:
        with _shown_log():
            code = typer.main.get_command(app).main(
                args=None if arguments is None else list(arguments),
                prog_name=name,
                standalone_mode=False,
            )
        sys.stdout.flush()
        return int(code or 0)
    except OutriderError as error:
        return _fail(error)
    except typer.TyperException as error:
        return _fail(OutriderError(error.format_message()))
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has left.
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        # A full disk, most often.
        _drop_output()
        return _fail(error)


def _fail(error: OutriderError | OSError) -> int:
    sys.stderr.write(error_line(error))
    return EXIT_ERROR


def _null_stream() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _drop_output() -> None:
    """What is still buffered must not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _shown_log() -> Iterator[None]:
    """Shows the package's log on stderr, a line a message."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("outrider")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _replace_errors(stream: TextIO) -> None:
    """Lets no character of a model's text end the program."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
