"""What `make run` shows: prompts decoded with drafts on, then what drafting brought."""

import sys
from collections.abc import Sequence
from statistics import median
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
# Of each, in turns; the medians are shown, so that a machine busy for a moment does not count.
NUM_ROUNDS = 3

app = make_app("outrider.entrypoints.demo")


@app.command()
@takes_engine_options()
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
    on_text = [_write] + [None] * (NUM_ROUNDS - 1)
    drafted = [DecodeRun(drafting.llm_engine, write) for write in on_text]
    undrafted = [DecodeRun(plain.llm_engine) for _ in on_text]
    for llm in (drafting, plain):
        _warm_up(DecodeRun(llm.llm_engine), prompts[0])
    params = [SamplingParams(temperature=0.0, max_tokens=max_tokens)]
    num_equal = 0
    for number, prompt in enumerate(prompts, 1):
        _show_prompt(console, number, prompt.text or "")
        for with_drafts, without in zip(drafted, undrafted, strict=True):
            texts = [run.run([prompt], params)[0].outputs[0] for run in (with_drafts, without)]
            if with_drafts.on_text is not None:
                console.print()
                num_equal += texts[0].token_ids == texts[1].token_ids
    console.print()
    console.print(_table(drafted, undrafted, drafting.llm_engine.config.num_speculative_tokens))
    console.print(
        f"{num_equal} of {NUM_PROMPTS} texts are token for token those of K = 0. "
        f"Speeds are medians of {NUM_ROUNDS} rounds; prompt processing and warm-up are not timed."
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


def _table(drafted: list["DecodeRun"], undrafted: list["DecodeRun"], k: int) -> "Table":
    from rich.table import Table

    # At temperature 0 every round decodes the same, so the counts are those of any of them.
    metrics = drafted[0].metrics
    fast, slow = (median(run.speed.tokens_per_s for run in runs) for runs in (drafted, undrafted))
    speed_up = median(
        one.speed.tokens_per_s / max(other.speed.tokens_per_s, 1e-9)
        for one, other in zip(drafted, undrafted, strict=True)
    )
    rates = ", ".join(f"{rate:.1%}" for rate in metrics.acceptance_rate_per_pos)
    table = Table("", "K = 0", f"K = {k}", title="temperature 0, one prompt at a time")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("tokens/s", f"{slow:.1f}", f"{fast:.1f}")
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
