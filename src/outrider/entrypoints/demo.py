"""What `make run` shows: prompts decoded with drafts on, then what drafting brought."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.bundled import BUNDLED_PROMPTS
from outrider.entrypoints.cli.options import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    Options,
    takes_engine_options,
)
from outrider.entrypoints.cli.prompt_sources import read_prompts_file
from outrider.entrypoints.cli.run import make_app, run
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from outrider.entrypoints.decode_run import DecodeRun
    from outrider.entrypoints.prompt_encoder import EncodedPrompt

NUM_PROMPTS = 3
# Lines of a prompt that are shown: enough to see what is being continued.
NUM_SHOWN_LINES = 6
NUM_WARM_UP_TOKENS = 8

app = make_app("outrider.entrypoints.demo")


@app.command()
@takes_engine_options
def demo(
    *,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens decoded per prompt.")] = 96,
    engine_options: Options,
) -> int:
    """Decode three bundled prompts with drafts and without, and compare the speed."""
    from rich.console import Console

    from outrider.entrypoints.decode_run import DecodeRun
    from outrider.entrypoints.llm import LLM

    k = DEFAULT_NUM_SPECULATIVE_TOKENS
    speculative = {"method": "mtp", "num_speculative_tokens": k}
    drafting = LLM(**{"speculative_config": speculative, **engine_options})
    plain = drafting.with_num_speculative_tokens(0)
    inputs = read_prompts_file(BUNDLED_PROMPTS)
    # Spread over the file, since neighbours are cut from one module.
    prompts = drafting.encode_prompts(inputs[:: len(inputs) // NUM_PROMPTS][:NUM_PROMPTS])
    console = Console(highlight=False)
    drafted, undrafted = DecodeRun(drafting.llm_engine, _write), DecodeRun(plain.llm_engine)
    for llm in (drafting, plain):
        _warm_up(DecodeRun(llm.llm_engine), prompts[0])
    params = [SamplingParams(temperature=0.0, max_tokens=max_tokens)]
    num_equal = 0
    for number, prompt in enumerate(prompts, 1):
        _show_prompt(console, number, prompt.text or "")
        (with_drafts,) = drafted.run([prompt], params)
        console.print()
        (without,) = undrafted.run([prompt], params)
        num_equal += with_drafts.outputs[0].token_ids == without.outputs[0].token_ids
    console.print()
    console.print(_table(drafted, undrafted, drafting.llm_engine.config.num_speculative_tokens))
    console.print(
        f"{num_equal} of {NUM_PROMPTS} texts are token for token those of K = 0. "
        "Prompt processing and warm-up are not timed."
    )
    return 0


def _warm_up(run: "DecodeRun", prompt: "EncodedPrompt") -> None:
    run.run([prompt], [SamplingParams(temperature=0.0, max_tokens=NUM_WARM_UP_TOKENS)])


def _write(_: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show_prompt(console: "Console", number: int, text: str) -> None:
    """Shows the end of a prompt, dimmed, so that its continuation can follow on the same line."""
    console.rule(f"prompt {number} of {NUM_PROMPTS}", align="left")
    lines = text.split("\n")[-NUM_SHOWN_LINES:]
    console.print("\n".join(lines), style="dim", end="", markup=False, soft_wrap=True)


def _table(drafted: "DecodeRun", undrafted: "DecodeRun", k: int) -> "Table":
    from rich.table import Table

    metrics = drafted.metrics
    speed_up = drafted.speed.tokens_per_s / max(undrafted.speed.tokens_per_s, 1e-9)
    rates = ", ".join(f"{rate:.1%}" for rate in metrics.acceptance_rate_per_pos)
    table = Table("", "K = 0", f"K = {k}", title="temperature 0, one prompt at a time")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row(
        "tokens/s",
        f"{undrafted.speed.tokens_per_s:.1f}",
        f"{drafted.speed.tokens_per_s:.1f}",
    )
    for name, value in (
        ("drafts", f"{metrics.num_drafts}"),
        ("draft tokens", f"{metrics.num_draft_tokens}"),
        ("accepted tokens", f"{metrics.num_accepted_tokens}"),
        ("acceptance rate", f"{metrics.acceptance_rate:.1%}"),
        ("acceptance rate by position", rates),
        ("mean acceptance length = bound on the speed-up", f"{metrics.mean_acceptance_length:.2f}"),
        ("measured speed-up", f"{speed_up:.2f}"),
    ):
        table.add_row(name, "", value)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demonstration and returns its exit code."""
    return run(app, "python -m outrider.entrypoints.demo", arguments)


if __name__ == "__main__":
    sys.exit(main())
