"""`outrider tune-head`: fits a checkpoint's MTP head to a workload."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.config import HeadTuningConfig
from outrider.entrypoints.cli.options import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    OFFLINE_MAX_NUM_SEQS,
    Options,
    speculative_options,
    takes_engine_options,
    takes_tuning_options,
)
from outrider.entrypoints.cli.prompt_sources import PROMPTS_HELP, read_sourced_prompts
from outrider.entrypoints.cli.report import report_console
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.entrypoints.acceptance import AcceptanceRow
    from outrider.entrypoints.head_tuning import HeadTuningReport

_PromptsFile = Annotated[
    Path,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help=f"The workload. {PROMPTS_HELP} Prompts whose lines name the same source are tuned on "
        "or measured on together.",
    ),
]
_OutputDir = Annotated[
    Path,
    typer.Option(
        "--output",
        metavar="DIR",
        help="New or empty folder for a copy of the checkpoint with the tuned head.",
    ),
]
_NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "-k",
        metavar="K",
        help="Drafts per step, 1 to 8: so many depths are tuned and measured.",
        show_default=str(DEFAULT_NUM_SPECULATIVE_TOKENS),
    ),
]


@takes_engine_options(max_num_seqs=OFFLINE_MAX_NUM_SEQS)
@takes_tuning_options
def tune_head(
    *,
    prompts_file: _PromptsFile,
    output_dir: _OutputDir,
    num_speculative_tokens: _NumSpeculativeTokens = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    tuning_options: Options,
    engine_options: Options,
) -> int:
    """Tune the head to what the model itself writes after your prompts.

    The model continues the prompts, and its MTP head is trained on these texts as it drafts, K
    deep. Nothing else is trained: trunk, embedding and lm_head keep their bytes, which is checked.
    The same seed gives the same head, unless --max-minutes ends it; with --compile it also depends
    on the number of threads.

    Acceptance is measured before and after on prompts that are held out, with 95 % intervals over
    them. The figures also stand in tune_head.json, beside the weights.

    32 requests run at once where --max-num-seqs is not given.
    """
    plan = HeadTuningConfig(**tuning_options)
    options = {"max_num_seqs": OFFLINE_MAX_NUM_SEQS, **engine_options}
    options["speculative_config"] = _speculative_config(num_speculative_tokens, options)
    checkpoint = Path(options.pop("model", BUNDLED_MODEL_DIR))
    prompts = read_sourced_prompts(prompts_file)
    from outrider.entrypoints.cli.phase_progress import show_phases
    from outrider.entrypoints.head_tuning import HeadTuning

    with show_phases(sys.stderr, is_quiet=is_json) as on_progress:
        report = HeadTuning(
            checkpoint=checkpoint,
            prompts=[prompt for prompt, _ in prompts],
            sources=[source for _, source in prompts],
            output_dir=output_dir,
            plan=plan,
            engine_options=options,
            on_progress=on_progress,
        ).run()
    if is_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _show(report, checkpoint, output_dir)
    return 0


def _speculative_config(k: int | None, options: Options) -> Options:
    if k == 0:
        raise ConfigError("-k must be from 1 to 8, got 0: there is no draft to tune for")
    given = speculative_options(k, options.get("speculative_config"))
    return given or {"num_speculative_tokens": DEFAULT_NUM_SPECULATIVE_TOKENS}


def _show(report: "HeadTuningReport", checkpoint: Path, output_dir: Path) -> None:
    from rich.table import Table

    from outrider.entrypoints.cli.acceptance_table import with_interval

    table = Table(title=f"{report.num_held_out} held-out prompts, 95 % intervals over prompts")
    for heading in ("T", "head"):
        table.add_column(heading, no_wrap=True)
    for heading in ("length", "length, fresh", "by position", "repeated"):
        table.add_column(heading, justify="right", no_wrap=True)
    for change in report.changes:
        table.add_row(f"{change.before.temperature:g}", "before", *_figures(change.before))
        table.add_row("", "after", *_figures(change.after))
        table.add_row(
            "",
            "gain",
            with_interval(change.gain, change.gain_ci95, "+.2f"),
            with_interval(change.gain_fresh, change.gain_fresh_ci95, "+.2f"),
            end_section=True,
        )
    console = report_console()
    console.print(table)
    tuning = report.tuning
    console.print(
        f"tuned on {report.num_texts:,} texts of {report.num_prompts:,} prompts: "
        f"{tuning.num_tokens:,} tokens in {tuning.num_steps:,} steps, {tuning.elapsed_s:.0f} s",
        f"all {report.num_unchanged_tensors:,} tensors of trunk, embedding and lm_head are byte "
        f"for byte those of {checkpoint}",
        str(output_dir),
        sep="\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _figures(row: "AcceptanceRow") -> tuple[str, ...]:
    from outrider.entrypoints.cli.acceptance_table import with_interval

    return (
        with_interval(row.mean_acceptance_length, row.ci95),
        with_interval(row.mean_acceptance_length_fresh, None),
        " ".join(f"{rate:.2f}" for rate in row.acceptance_rate_per_pos),
        f"{row.repeated_share:.1%}",
    )
