"""`outrider vllm`: the plugin of vLLM."""

from typing import TYPE_CHECKING

import typer

from outrider.entrypoints.cli.run import EXIT_ERROR, make_app

if TYPE_CHECKING:
    from outrider.vllm_plugin.doctor import Diagnosis

vllm = make_app("vllm")


@vllm.callback(invoke_without_command=True)
def choose(context: typer.Context) -> None:
    """Use Outrider as a plugin of vLLM."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_ERROR)


@vllm.command()
def doctor() -> int:
    """Show which hooks of the plugin are in place in the vLLM that is installed here.

    Ends with 2 where vLLM would not load the plugin.
    """
    from outrider.vllm_plugin.doctor import diagnose

    diagnosis = diagnose()
    _show(diagnosis)
    if diagnosis.obstacle is None:
        return 0
    typer.echo(f"error: vLLM does not load the plugin: {diagnosis.obstacle}", err=True)
    return EXIT_ERROR


def _show(diagnosis: "Diagnosis") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"vLLM {diagnosis.version} on {diagnosis.platform}")
    for heading in ("hook", "state", "why", "switched off by"):
        table.add_column(heading)
    for state in diagnosis.states:
        hook = state.hook
        table.add_row(
            hook.name,
            "on" if state.is_active else "off",
            state.obstacle or hook.purpose,
            f"{hook.variable}=0",
        )
    Console().print(table)
