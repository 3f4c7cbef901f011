"""A head tuned to a domain that its checkpoint was not trained on: the losses side by side.

The domain is a folder of text, by default the C++ headers that torch brings along. Prompts are cut
from it in mid-file; the same of them are tuned on under each loss, and the same are held out, whole
files at a time. Everything is `outrider tune-head`, run once for each loss.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import torch
import typer
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.provenance import provenance
from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.config import EngineConfig, HeadTuningConfig
from outrider.config.head_tuning import LossKind
from outrider.entrypoints.cli.acceptance_table import with_interval
from outrider.entrypoints.cli.options import OFFLINE_MAX_NUM_SEQS
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.entrypoints.head_tuning import HeadTuning, HeadTuningReport
from outrider.errors import ConfigError
from outrider.training.documents import read_documents
from outrider.training.prompts import MAX_PER_DOCUMENT, Prompt, make_prompts

if TYPE_CHECKING:
    from outrider.entrypoints.head_tuning import AcceptanceChange

HEADERS = Path(torch.__file__).parent / "include" / "torch"
NUM_SPECULATIVE_TOKENS = 3

app = make_app("benchmarks.domain_tuning")


def cut_prompts(model: Path, folder: Path, suffix: str, num_prompts: int) -> list[Prompt]:
    """Prompts of a folder's files, at most two of a file, spread over the files.

    Raises:
        OutriderError: there are too few texts that are long enough.
    """
    documents = read_documents("--documents", (folder,), (suffix,))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # Longer files first: half of the short ones have no middle to cut.
    documents.sort(key=lambda document: (-len(document.text), document.source))
    prompts: list[Prompt] = []
    for document in documents:
        if len(prompts) >= num_prompts:
            break
        prompts += make_prompts(
            tokenizer, [document], suite="prose", max_per_document=MAX_PER_DOCUMENT
        )
    if len(prompts) < num_prompts:
        raise ConfigError(
            f"--documents: {folder} gives {len(prompts)} prompts in files *{suffix}, and "
            f"{num_prompts} are asked for"
        )
    return prompts[:num_prompts]


def relative_gain(change: "AcceptanceChange") -> float | None:
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
    num_prompts: Annotated[int, typer.Option(metavar="N", min=2)] = 400,
    losses: Annotated[str, typer.Option(metavar="LIST")] = "ce,kl,lk",
    temperatures: Annotated[str, typer.Option(metavar="LIST")] = "0,1",
    max_tokens: Annotated[int, typer.Option(metavar="N", min=3, help="Of each text.")] = 128,
    epochs: Annotated[int, typer.Option(metavar="N", min=1)] = 3,
    compile: Annotated[bool, typer.Option(help="Train with native kernels.")] = False,
) -> int:
    """Tune the head to another domain under each loss.

    The last line of the output is JSON, with where the numbers come from.
    """
    kinds = losses.split(",")
    plans = [
        HeadTuningConfig(
            loss=_loss(kind),
            temperatures=temperatures,
            max_tokens=max_tokens,
            num_epochs=epochs,
            compile=compile,
        )
        for kind in kinds
    ]
    prompts = cut_prompts(model, documents, suffix, num_prompts)
    reports = [_tune(model, prompts, plan) for plan in plans]
    for kind, report in zip(kinds, reports, strict=True):
        _show(kind, report)
    config = EngineConfig().resolve()
    result: dict[str, Any] = {
        "benchmark": "domain_tuning",
        "documents": documents.name,
        "num_prompts": num_prompts,
        "results": [
            {
                "loss": kind,
                **report.to_dict(),
                "relative_gains_fresh": [relative_gain(change) for change in report.changes],
            }
            for kind, report in zip(kinds, reports, strict=True)
        ],
        "provenance": provenance(str(config.device), config.dtype),
    }
    sys.stdout.write(f"{json.dumps(result)}\n")
    return 0


def _loss(kind: str) -> LossKind:
    if kind not in get_args(LossKind):
        raise ConfigError(f"--losses must be some of ce, kl and lk, got {kind!r}")
    return kind  # type: ignore[return-value]


def _tune(model: Path, prompts: list[Prompt], plan: HeadTuningConfig) -> HeadTuningReport:
    folder = Path(tempfile.mkdtemp(prefix="outrider-"))
    told = ""

    def tell(phase: str, fraction: float, figures: str) -> None:
        nonlocal told
        line = f"{plan.loss}: {phase} {fraction:.0%}"
        if fraction >= 1 and line != told:
            sys.stderr.write(f"{line} {figures}\n")
            told = line

    try:
        return HeadTuning(
            checkpoint=model,
            prompts=[prompt.prompt for prompt in prompts],
            sources=[prompt.source for prompt in prompts],
            output_dir=folder / "tuned",
            plan=plan,
            engine_options={
                "max_num_seqs": OFFLINE_MAX_NUM_SEQS,
                "speculative_config": {"num_speculative_tokens": NUM_SPECULATIVE_TOKENS},
            },
            on_progress=tell,
        ).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _show(kind: str, report: HeadTuningReport) -> None:
    table = Table(title=f"loss {kind}, {report.num_held_out} held-out prompts")
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
    report_console().print(table)


if __name__ == "__main__":
    sys.exit(run(app, "benchmarks.domain_tuning"))
