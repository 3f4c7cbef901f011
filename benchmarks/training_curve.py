"""What training brings: acceptance of a run's exports over tokens seen and hours spent.

A run with `export_every_tokens` keeps its weights on the way. Each of them decodes the same
held-out prompts at temperature 0; the gain of a row is that of its mean acceptance length over
fresh windows since the row before, in an hour of the run's own time, prompt against prompt. The
decay of the learning rate brings a gain of its own at a run's end, which another hour would not
bring again.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.provenance import provenance
from outrider.bundled import BUNDLED_SUITES
from outrider.config import EngineConfig
from outrider.entrypoints.acceptance import AcceptanceSample, sample_acceptance
from outrider.entrypoints.acceptance_plot import check_plot_path
from outrider.entrypoints.cli.acceptance_table import with_interval
from outrider.entrypoints.cli.options import OFFLINE_MAX_NUM_SEQS
from outrider.entrypoints.cli.prompt_sources import (
    PROMPTS_HELP,
    PromptInput,
    read_prompts_file,
)
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.entrypoints.llm import LLM
from outrider.entrypoints.ratio_estimate import RatioEstimate
from outrider.errors import ConfigError
from outrider.training.prompts import spread_evenly
from outrider.training.run_log import LOG_FILE, read_log
from outrider.training.train import EXPORT_FOLDER
from outrider.training.trainer import EXPORTS_FOLDER

_STEP = "step-"

app = make_app("benchmarks.training_curve")


@dataclass(frozen=True)
class Weights:
    """What a run has kept.

    Attributes:
        folder: a checkpoint.
        step: of the run; 0 is what it started from.
        num_tokens: seen by then.
        hours: of the run's own time by then, evaluations and checkpoints included.
    """

    folder: Path
    step: int = 0
    num_tokens: int = 0
    hours: float = 0.0


@dataclass(frozen=True)
class Point:
    """How one set of weights drafts.

    Attributes:
        step: as in `Weights`, and so are the next two.
        num_tokens: seen.
        hours: of training.
        mean_acceptance_length: over all windows.
        ci95: its interval over prompts; None of a single prompt.
        mean_acceptance_length_fresh: over windows without a repeated token; None where there are
            none.
        ci95_fresh: its interval.
        repeated_share: repeated / generated tokens.
    """

    step: int
    num_tokens: int
    hours: float
    mean_acceptance_length: float
    ci95: tuple[float, float] | None
    mean_acceptance_length_fresh: float | None
    ci95_fresh: tuple[float, float] | None
    repeated_share: float

    @classmethod
    def of(cls, weights: Weights, sample: AcceptanceSample) -> "Point":
        """The figures of weights that decoded the prompts."""
        length, fresh, total = sample.length, sample.fresh_length, sample.total
        return cls(
            weights.step,
            weights.num_tokens,
            weights.hours,
            length.value,
            sample.length_ci95(length),
            None if fresh is None else fresh.value,
            sample.length_ci95(fresh),
            total.num_repeated_tokens / total.num_tokens,
        )


@dataclass(frozen=True)
class Gain:
    """What an hour has brought to the mean acceptance length over fresh windows.

    Attributes:
        per_hour: the difference to the weights before, by the hours between them.
        ci95: its interval over the prompts, which are the same; None of a single prompt.
    """

    per_hour: float
    ci95: tuple[float, float] | None


def gains_per_hour(
    hours: Sequence[float], lengths: Sequence[RatioEstimate | None], k: int
) -> list[Gain | None]:
    """The gain of each set of weights since the one before; None where there is none.

    Args:
        hours: of a run, in order.
        lengths: over fresh windows, on the same prompts.
        k: drafts per step; no length differs from another by more.
    """
    gains: list[Gain | None] = [None]
    for (start, before), (end, after) in pairwise(zip(hours, lengths, strict=True)):
        if before is None or after is None or end <= start:
            gains.append(None)
            continue
        gain = after.minus(before)
        bounds = gain.ci95(-k, k)
        if bounds is not None:
            bounds = (bounds[0] / (end - start), bounds[1] / (end - start))
        gains.append(Gain(gain.value / (end - start), bounds))
    return gains


def find_exports(run_dir: Path) -> list[Weights]:
    """The weights that a run has kept, in order.

    Raises:
        ConfigError: there are none.
        OutriderError: the run's log is missing or damaged.
    """
    records = read_log(run_dir / LOG_FILE)
    folders = {
        int(folder.name.removeprefix(_STEP)): folder
        for folder in (run_dir / EXPORTS_FOLDER).glob(f"{_STEP}*")
        if (folder / "config.json").exists()
    }
    # The export of an end stays while the run goes on with a larger budget.
    ends = [record["step"] for record in records if record["budget_used"] >= 1]
    if ends and (run_dir / EXPORT_FOLDER / "config.json").exists():
        folders[ends[-1]] = run_dir / EXPORT_FOLDER
    if not records or not folders:
        raise ConfigError(f"{run_dir}: no weights to measure; train with run.export_every_tokens")
    found = []
    for step, folder in sorted(folders.items()):
        # The log need not have a record of just this step.
        nearest = min(records, key=lambda record: abs(record["step"] - step))
        share = step / nearest["step"]
        num_tokens = round(nearest["num_tokens"] * share)
        found.append(Weights(folder, step, num_tokens, nearest["elapsed_s"] * share / 3600))
    return found


@app.command()
def training_curve(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run.")],
    *,
    start: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The checkpoint it started from, as a first row."),
    ] = None,
    k: Annotated[int, typer.Option("-k", metavar="K", min=1, help="Drafts per step.")] = 3,
    prompts_file: Annotated[
        Path, typer.Option("--prompts", metavar="FILE", help=PROMPTS_HELP)
    ] = BUNDLED_SUITES["code"],
    num_prompts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Spread over the file; else all.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=3, help="Tokens per prompt.")] = 128,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Write a picture as well.")
    ] = None,
) -> int:
    """Measure acceptance over the course of a training run.

    The last line of the output is JSON, with where the numbers come from.
    """
    if plot is not None:
        check_plot_path(plot)
    inputs = read_prompts_file(prompts_file)
    inputs = inputs if num_prompts is None else spread_evenly(inputs, num_prompts)
    exports = find_exports(run_dir)
    if start is not None:
        exports.insert(0, Weights(start))
    samples = [_measure(weights, inputs, k, max_tokens) for weights in exports]
    points = [Point.of(*one) for one in zip(exports, samples, strict=True)]
    gains = gains_per_hour(
        [point.hours for point in points], [sample.fresh_length for sample in samples], k
    )
    _show(points, gains, f"K = {k}, temperature 0, {len(inputs)} prompts of {prompts_file.stem}")
    config = EngineConfig().resolve()
    report: dict[str, Any] = {
        "benchmark": "training_curve",
        "k": k,
        "prompts": len(inputs),
        "max_tokens": max_tokens,
        "points": [
            {**asdict(point), "gain": None if gain is None else asdict(gain)}
            for point, gain in zip(points, gains, strict=True)
        ],
        "provenance": provenance(str(config.device), config.dtype),
    }
    sys.stdout.write(f"{json.dumps(report)}\n")
    if plot is not None:
        plot_curve(points, plot)
    return 0


def _measure(
    weights: Weights, inputs: list[PromptInput], k: int, max_tokens: int
) -> AcceptanceSample:
    llm = LLM(
        str(weights.folder),
        speculative_config={"method": "mtp", "num_speculative_tokens": k},
        max_num_seqs=OFFLINE_MAX_NUM_SEQS,
        enable_prefix_caching=False,
    )
    sample = sample_acceptance(
        llm,
        llm.encode_prompts(inputs),
        temperature=0.0,
        rule="standard",
        max_tokens=max_tokens,
        seed=0,
    )
    sys.stderr.write(f"{weights.folder}: {sample.length.value:.3f}\n")
    return sample


def plot_curve(points: list[Point], path: Path) -> None:
    """Draws both lengths with their intervals over the tokens seen, as a PNG."""
    # Without pyplot there is no state of the process and no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, values, intervals in (
        (
            "all windows",
            [point.mean_acceptance_length for point in points],
            [point.ci95 for point in points],
        ),
        (
            "fresh windows",
            [point.mean_acceptance_length_fresh for point in points],
            [point.ci95_fresh for point in points],
        ),
    ):
        drawn = [
            (point.num_tokens / 1e6, value, interval or (value, value))
            for point, value, interval in zip(points, values, intervals, strict=True)
            if value is not None
        ]
        axes.errorbar(
            [tokens for tokens, _, _ in drawn],
            [value for _, value, _ in drawn],
            yerr=[
                [value - low for _, value, (low, _) in drawn],
                [high - value for _, value, (_, high) in drawn],
            ],
            fmt="o-",
            capsize=3,
            label=label,
        )
    axes.set_xlabel("million tokens seen")
    axes.set_ylabel("mean acceptance length")
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _show(points: list[Point], gains: list[Gain | None], setting: str) -> None:
    table = Table(title=f"acceptance in the course of training, {setting}")
    for heading in ("step", "tokens", "hours", "length", "fresh", "repeated", "fresh, an hour"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point, gain in zip(points, gains, strict=True):
        table.add_row(
            str(point.step),
            f"{point.num_tokens / 1e6:.2f} M",
            f"{point.hours:.2f}",
            with_interval(point.mean_acceptance_length, point.ci95),
            with_interval(point.mean_acceptance_length_fresh, point.ci95_fresh),
            f"{point.repeated_share:.1%}",
            "" if gain is None else with_interval(gain.per_hour, gain.ci95, "+.3f"),
        )
    report_console(120).print(table)


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.training_curve"))
