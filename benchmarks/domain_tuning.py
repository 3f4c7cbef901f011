"""A head tuned to a domain that its checkpoint was not trained on: the losses side by side.

The domain is a folder of text, by default the C++ headers that torch's build writes of its
operators. Prompts are cut from it in mid-file; the same of them are tuned on under each loss, and
the same are held out, whole files at a time. Everything is `outrider tune-head`, run once for each
loss.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import typer
from rich.table import Table

from benchmarks.provenance import provenance
from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.config import LEAST_DRAFTED_TOKENS, EngineConfig, HeadTuningConfig
from outrider.entrypoints.cli.acceptance_table import with_interval
from outrider.entrypoints.cli.options import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    OFFLINE_MAX_NUM_SEQS,
)
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.entrypoints.head_tuning import AcceptanceChange, HeadTuning, HeadTuningReport
from outrider.errors import ConfigError
from outrider.training.documents import read_documents
from outrider.training.prompts import (
    MAX_PER_DOCUMENT,
    Prompt,
    load_tokenizer,
    make_prompts,
    places_to_cut,
    spread_evenly,
)

if TYPE_CHECKING:
    from outrider.config.head_tuning import LossKind

SUITE = "prose"  # Not Python: a file is cut anywhere in its halves.
HEADERS = Path(torch.__file__).parent / "include" / "ATen" / "ops"

app = make_app("benchmarks.domain_tuning")


def cut_prompts(model: Path, folder: Path, suffix: str, num_prompts: int) -> list[Prompt]:
    """Prompts of a folder's files, at most two of a file, spread over those that are long enough.

    Raises:
        OutriderError: there are too few such texts, or the checkpoint has no tokenizer.
    """
    tokenizer = load_tokenizer(model)
    documents = [
        document
        for document in read_documents("--documents", (folder,), (suffix,))
        if places_to_cut(document.text, SUITE)
    ]
    # To cut a text is to encode all that stands before, so it is not done without need.
    step = max(1, len(documents) // num_prompts)
    prompts = make_prompts(
        tokenizer, documents[::step], suite=SUITE, max_per_document=MAX_PER_DOCUMENT
    )
    if len(prompts) < num_prompts:
        raise ConfigError(
            f"--documents: {folder} gives {len(prompts)} prompts in files *{suffix}, and "
            f"{num_prompts} are asked for"
        )
    return spread_evenly(prompts, num_prompts)


def relative_gain(change: AcceptanceChange) -> float | None:
    """Of the length over fresh windows, as a share of what it was; None where there are none."""
    before = change.before.mean_acceptance_length_fresh
    if before is None or change.gain_fresh is None:
        return None
    return change.gain_fresh / before


@app.command()
def domain_tuning(
    *,
    model: Annotated[
        Path, typer.Option(metavar="DIR", help="The checkpoint, which is not changed.")
    ] = BUNDLED_MODEL_DIR,
    documents: Annotated[Path, typer.Option(metavar="DIR", help="The domain's texts.")] = HEADERS,
    suffix: Annotated[str, typer.Option(help="Of the files that are read.")] = ".h",
    num_prompts: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tuned on and held out together.")
    ] = 800,
    losses: Annotated[
        str, typer.Option(metavar="LIST", help="What the head is held to, one after the other.")
    ] = "ce,kl,lk",
    temperatures: Annotated[
        str, typer.Option(metavar="LIST", help="Texts are written and measured at each.")
    ] = "0,0.7",
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=LEAST_DRAFTED_TOKENS, help="Tokens of each text.")
    ] = 128,
    epochs: Annotated[
        int, typer.Option(metavar="N", min=1, help="How often each text is seen.")
    ] = 3,
    compile: Annotated[bool, typer.Option(help="Train with native kernels.")] = False,
) -> int:
    """Tune the head to another domain under each loss.

    The last line of the output is JSON, with where the numbers come from.
    """
    plans = [
        HeadTuningConfig(
            loss=cast("LossKind", kind),
            temperatures=temperatures,
            max_tokens=max_tokens,
            num_epochs=epochs,
            compile=compile,
        )
        for kind in losses.split(",")
    ]
    prompts = cut_prompts(model, documents, suffix, num_prompts)
    results = []
    for plan in plans:
        report = _tune(model, prompts, plan)
        _show(plan, report)
        gains = [relative_gain(change) for change in report.changes]
        results.append({"plan": asdict(plan), **report.to_dict(), "relative_gains_fresh": gains})
    config = EngineConfig().resolve()
    result: dict[str, Any] = {
        "benchmark": "domain_tuning",
        "model": "bundled" if model == BUNDLED_MODEL_DIR else str(model),
        "k": DEFAULT_NUM_SPECULATIVE_TOKENS,
        "documents": documents.resolve().name,
        "suffix": suffix,
        "num_prompts": num_prompts,
        "results": results,
        "provenance": provenance(str(config.device), config.dtype),
    }
    sys.stdout.write(f"{json.dumps(result)}\n")
    return 0


def _tune(model: Path, prompts: list[Prompt], plan: HeadTuningConfig) -> HeadTuningReport:
    def tell(phase: str, fraction: float, figures: str) -> None:
        if fraction >= 1:
            sys.stderr.write(f"{plan.loss}: {phase}: {figures}\n")

    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        return HeadTuning(
            checkpoint=model,
            prompts=[prompt.prompt for prompt in prompts],
            sources=[prompt.source for prompt in prompts],
            output_dir=Path(folder) / "tuned",
            plan=plan,
            engine_options={
                "max_num_seqs": OFFLINE_MAX_NUM_SEQS,
                "speculative_config": {"num_speculative_tokens": DEFAULT_NUM_SPECULATIVE_TOKENS},
            },
            on_progress=tell,
        ).run()


def _show(plan: HeadTuningConfig, report: HeadTuningReport) -> None:
    table = Table(title=f"loss {plan.loss}, {report.num_held_out} held-out prompts")
    for heading in ("T", "before", "after", "gain", "before, fresh", "after, fresh", "gain, fresh"):
        table.add_column(heading, justify="right", no_wrap=True)
    for change in report.changes:
        share = relative_gain(change)
        table.add_row(
            f"{change.before.temperature:g}",
            with_interval(change.before.mean_acceptance_length, None),
            with_interval(change.after.mean_acceptance_length, None),
            with_interval(change.gain, change.gain_ci95, "+.2f"),
            with_interval(change.before.mean_acceptance_length_fresh, None),
            with_interval(change.after.mean_acceptance_length_fresh, None),
            with_interval(change.gain_fresh, change.gain_fresh_ci95, "+.2f")
            + ("" if share is None else f", {share:+.1%}"),
        )
    report_console(120).print(table)


if __name__ == "__main__":
    sys.exit(run(app, "benchmarks.domain_tuning"))
