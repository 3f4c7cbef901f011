"""The program `outrider`: its commands under one name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from outrider.entrypoints.cli.bench import bench
from outrider.entrypoints.cli.check import check
from outrider.entrypoints.cli.generate import generate
from outrider.entrypoints.cli.run import EXIT_ERROR, make_app, run
from outrider.entrypoints.cli.serve import serve
from outrider.entrypoints.cli.train import train
from outrider.entrypoints.cli.tune_head import tune_head
from outrider.entrypoints.cli.vllm import vllm

if TYPE_CHECKING:
    from collections.abc import Sequence

app = make_app("outrider")
app.command()(generate)
app.command()(check)
app.command()(serve)
app.command()(train)
app.add_typer(bench, name="bench")
app.command()(tune_head)
app.add_typer(vllm, name="vllm")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from outrider import __version__

        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def outrider(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does what it says
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Decode Qwen4-Exp checkpoints with their own multi-token-prediction head.

    With no model named, the bundled checkpoint is used.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: without the name of the program; None is those of the process.
    """
    return run(app, "outrider", arguments)
