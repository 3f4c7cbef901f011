"""What a head costs its trunk: the same training with the head and without, stage by stage.

A stage is a configuration of `outrider train`, cut to a budget of its own. Each goes on from the
export of the one before, with a fresh optimiser. The sides start with the same trunk and see the
same windows in the same order; they differ in `mtp_weight` or `detach_trunk` alone.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.provenance import provenance
from outrider.config import EngineConfig
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.errors import ConfigError
from outrider.training.checkpoint import CHECKPOINTS_FOLDER
from outrider.training.config import TrainConfig
from outrider.training.run_log import LOG_FILE, read_log
from outrider.training.train import EXPORT_FOLDER, make_trainer, run_to_the_end

# As configured; hidden from the head's gradient; without a head.
HEAD, DETACHED, TRUNK = SIDES = ("head", "detached", "trunk")
# Of the bundled checkpoint, at a tenth of their length.
STAGES = ",".join(f"configs/bundled{name}.toml" for name in ("", "_corpus", "_head"))
SETTINGS_FILE = "settings.json"
TOKENS = "226_000,800_000,900_000"

app = make_app("benchmarks.head_cost")


@dataclass(frozen=True)
class StageCost:
    """Held-out figures at the end of a stage.

    Attributes:
        stage: name of its configuration.
        side: how its head was trained, `HEAD` or `DETACHED`.
        num_tokens: that each side has seen in it.
        bits_per_byte: of the trunk that was trained with a head.
        bits_per_byte_alone: of the one without.
        agreement_per_depth: of the head with its trunk.
    """

    stage: str
    side: str
    num_tokens: int
    bits_per_byte: float
    bits_per_byte_alone: float
    agreement_per_depth: list[float]

    @property
    def cost(self) -> float:
        """What the head costs, as a share of the bits per byte without; below 0 it helps."""
        return self.bits_per_byte / self.bits_per_byte_alone - 1.0


def stage_config(
    path: Path, output_dir: Path, *, max_tokens: int, first_weights: Path | None, side: str
) -> TrainConfig:
    """The configuration of one side of a stage.

    Args:
        path: of the stage.
        output_dir: of this side.
        max_tokens: its budget, in place of any other.
        first_weights: a checkpoint to go on from; None starts fresh.
        side: of `SIDES`.
    """
    config = TrainConfig.from_toml(path)
    if not config.loss.num_depths:
        raise ConfigError(f"{path}: loss.mtp_weight is 0, so that there is no head to compare")
    return replace(
        config,
        # Evaluated at the end alone, in one thread a side: the balance of routers is of a share of
        # the batch where workers share it.
        run=replace(
            config.run,
            output_dir=output_dir,
            init_from=first_weights,
            eval_every_steps=sys.maxsize,
            export_every_tokens=None,
            num_eval_windows=64,
            num_workers=1,
        ),
        loss=replace(
            config.loss,
            mtp_weight=0.0 if side == TRUNK else config.loss.mtp_weight,
            detach_trunk=side == DETACHED or config.loss.detach_trunk,
        ),
        schedule=replace(config.schedule, max_tokens=max_tokens, max_minutes=None, warmup_steps=40),
    )


def run_side(
    side: str, stages: list[Path], tokens: list[int], folder: Path, start: Path | None = None
) -> list[Path]:
    """Trains one side through all stages, from where it stands; returns its folders."""
    folders: list[Path] = []
    for path, max_tokens in zip(stages, tokens, strict=True):
        output_dir = folder / f"{side}_{len(folders) + 1}"
        config = stage_config(
            path,
            output_dir,
            max_tokens=max_tokens,
            first_weights=folders[-1] / EXPORT_FOLDER if folders else start,
            side=side,
        )
        _keep_settings(config)
        sys.stderr.write(f"{side}: {path}, {max_tokens:,} tokens\n")
        run_to_the_end(make_trainer(config), config)
        folders.append(output_dir)
    return folders


def _keep_settings(config: TrainConfig) -> None:
    """Writes down how a run is trained; one that was trained in another way is no measurement."""
    folder = config.run.output_dir
    file = folder / SETTINGS_FILE
    settings = json.dumps(asdict(config), default=str, indent=1)
    # One that failed before its first step has left nothing to go on from.
    if not any((folder / name).exists() for name in (LOG_FILE, CHECKPOINTS_FOLDER)):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(settings, encoding="utf-8")
    elif not file.exists():
        raise ConfigError(f"{folder}: a run with unknown settings is in it: name another DIR")
    elif file.read_text(encoding="utf-8") != settings:
        raise ConfigError(f"{folder}: a run with other settings is in it: name another DIR")


def compare(stages: list[Path], folders: dict[str, list[Path]]) -> list[StageCost]:
    """The last evaluations of each side with a head, beside those of the one without."""
    costs = []
    for number, stage in enumerate(stages):
        last = {
            side: [one for one in read_log(runs[number] / LOG_FILE) if one["kind"] == "eval"][-1]
            for side, runs in folders.items()
        }
        alone = last.pop(TRUNK)
        costs += [
            StageCost(
                stage.stem,
                side,
                one["num_tokens"],
                one["bits_per_byte"],
                alone["bits_per_byte"],
                one["agreement_per_depth"],
            )
            for side, one in last.items()
        ]
    return costs


@app.command()
def head_cost(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets the runs; they go on in it.")],
    *,
    stages: Annotated[
        str, typer.Option(metavar="LIST", help="Configurations, one after the other.")
    ] = STAGES,
    tokens: Annotated[str, typer.Option(metavar="LIST", help="The budget of each.")] = TOKENS,
    start: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint that the first goes on from; else fresh."),
    ] = None,
    sides: Annotated[
        str, typer.Option(metavar="LIST", help=f"Compared with {TRUNK}: {HEAD}, {DETACHED}.")
    ] = HEAD,
    only: Annotated[
        str | None, typer.Option(metavar="|".join(SIDES), help="Train this side, compare nothing.")
    ] = None,
) -> int:
    """Train with a head and without, and compare the trunks on held-out text.

    The last line of the output is JSON, with where the numbers come from.
    """
    paths = [Path(name) for name in stages.split(",")]
    try:
        budgets = [int(number) for number in tokens.split(",")]
    except ValueError:
        raise ConfigError(f"--tokens: numbers such as {TOKENS} are needed, got {tokens}") from None
    if len(budgets) != len(paths):
        raise ConfigError(f"--tokens: {len(budgets)} budgets for {len(paths)} stages")
    if only is not None:
        _check_side("--only", only, SIDES)
        run_side(only, paths, budgets, folder, start)
        return 0
    compared = sides.split(",")
    for side in compared:
        _check_side("--sides", side, (HEAD, DETACHED))
    costs = compare(
        paths,
        {side: run_side(side, paths, budgets, folder, start) for side in (*compared, TRUNK)},
    )
    _show(costs)
    device = EngineConfig().resolve().device
    report: dict[str, Any] = {
        "benchmark": "head_cost",
        "stages": [{**vars(one), "cost": one.cost} for one in costs],
        "provenance": provenance(str(device), "float32"),
    }
    sys.stdout.write(f"{json.dumps(report)}\n")
    return 0


def _check_side(option: str, side: str, known: Sequence[str]) -> None:
    if side not in known:
        raise ConfigError(f"{option}: one of {', '.join(known)} is needed, got {side}")


def _show(costs: list[StageCost]) -> None:
    table = Table(title="bits per byte, held out")
    for heading in (
        "stage", "head", "tokens", "with it", "without", "its cost", "agreement by depth",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for one in costs:
        table.add_row(
            one.stage,
            "as configured" if one.side == HEAD else one.side,
            f"{one.num_tokens:,}",
            f"{one.bits_per_byte:.4f}",
            f"{one.bits_per_byte_alone:.4f}",
            f"{one.cost:+.2%}",
            " ".join(f"{share:.2f}" for share in one.agreement_per_depth),
        )
    report_console(100).print(table)


if __name__ == "__main__":
    sys.exit(run(app, "benchmarks.head_cost"))
