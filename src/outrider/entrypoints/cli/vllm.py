"""`outrider vllm`: the plugin of vLLM."""

from typing import TYPE_CHECKING

import typer

from outrider.entrypoints.cli.run import EXIT_ERROR, make_group

if TYPE_CHECKING:
    from outrider.vllm_plugin.doctor import Diagnosis

vllm = make_group("vllm", "Use Outrider as a plugin of vLLM.")


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
    typer.echo(f"vLLM {diagnosis.version} on {diagnosis.platform}")
    width = max(len(state.hook.name) for state in diagnosis.states)
    for state in diagnosis.states:
        word = "on " if state.is_active else "off"
        why = state.obstacle or state.hook.purpose
        typer.echo(f"  {word}  {state.hook.name:<{width}}  {why}")
    last = diagnosis.states[-1].hook
    typer.echo(f"An environment variable leaves a hook out: {last.variable}=0, {last.name}.")
