"""What a head costs its trunk: the same training with the head and without, stage by stage.

A stage is a configuration of `outrider train`, cut to a budget of its own. Each goes on from the
export of the one before, with a fresh optimiser. The two sides start with the same trunk, see the
same windows in the same order, and differ in `mtp_weight` alone.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.provenance import provenance
from outrider.config import EngineConfig
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.errors import ConfigError
from outrider.training.config import TrainConfig
from outrider.training.run_log import LOG_FILE, read_log
from outrider.training.train import EXPORT_FOLDER, make_trainer, run_to_the_end

SIDES = ("head", "trunk")
# Of the bundled checkpoint, at a tenth of their length.
STAGES = ",".join(f"configs/bundled{name}.toml" for name in ("", "_corpus", "_head"))
TOKENS = "226_000,800_000,900_000"

app = make_app("benchmarks.head_cost")


@dataclass(frozen=True)
class StageCost:
    """Held-out figures at the end of a stage.

    Attributes:
        stage: name of its configuration.
        num_tokens: that each side has seen in it.
        bits_per_byte: of the trunk that was trained with a head.
        bits_per_byte_alone: of the one without.
        agreement_per_depth: of the head with its trunk.
    """

    stage: str
    num_tokens: int
    bits_per_byte: float
    bits_per_byte_alone: float
    agreement_per_depth: list[float]

    @property
    def cost(self) -> float:
        """What the head costs, as a share of the bits per byte without; below 0 it helps."""
        return self.bits_per_byte / self.bits_per_byte_alone - 1.0


def stage_config(
    path: Path, output_dir: Path, *, max_tokens: int, first_weights: Path | None, has_head: bool
) -> TrainConfig:
    """The configuration of one side of a stage.

    Args:
        path: of the stage.
        output_dir: of this side.
        max_tokens: its budget, in place of any other.
        first_weights: export of the stage before; None starts fresh.
        has_head: train one beside the trunk.
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
        loss=config.loss if has_head else replace(config.loss, mtp_weight=0.0),
        schedule=replace(config.schedule, max_tokens=max_tokens, max_minutes=None, warmup_steps=40),
    )


def run_side(side: str, stages: list[Path], tokens: list[int], folder: Path) -> list[Path]:
    """Trains one side through all stages, from where it stands; returns its folders."""
    folders: list[Path] = []
    for path, max_tokens in zip(stages, tokens, strict=True):
        output_dir = folder / f"{side}_{len(folders) + 1}"
        config = stage_config(
            path,
            output_dir,
            max_tokens=max_tokens,
            first_weights=folders[-1] / EXPORT_FOLDER if folders else None,
            has_head=side == "head",
        )
        sys.stderr.write(f"{side}: {path}, {max_tokens:,} tokens\n")
        run_to_the_end(make_trainer(config), config)
        folders.append(output_dir)
    return folders


def compare(stages: list[Path], folders: dict[str, list[Path]]) -> list[StageCost]:
    """The last evaluations of both sides."""
    costs = []
    for stage, headed, alone in zip(stages, *(folders[side] for side in SIDES), strict=True):
        last, last_alone = (
            [record for record in read_log(one / LOG_FILE) if record["kind"] == "eval"][-1]
            for one in (headed, alone)
        )
        costs.append(
            StageCost(
                stage.stem,
                last["num_tokens"],
                last["bits_per_byte"],
                last_alone["bits_per_byte"],
                last["agreement_per_depth"],
            )
        )
    return costs


@app.command()
def head_cost(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets the runs; they go on in it.")],
    *,
    stages: Annotated[
        str, typer.Option(metavar="LIST", help="Configurations, one after the other.")
    ] = STAGES,
    tokens: Annotated[str, typer.Option(metavar="LIST", help="The budget of each.")] = TOKENS,
    side: Annotated[
        str | None, typer.Option(metavar="|".join(SIDES), help="Train this side alone.")
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
    if side is not None:
        if side not in SIDES:
            raise ConfigError(f"--side must be one of {', '.join(SIDES)}, got {side}")
        run_side(side, paths, budgets, folder)
        return 0
    costs = compare(paths, {one: run_side(one, paths, budgets, folder) for one in SIDES})
    _show(costs)
    device = EngineConfig().resolve().device
    report: dict[str, Any] = {
        "benchmark": "head_cost",
        "stages": [{**vars(one), "cost": one.cost} for one in costs],
        "provenance": provenance(str(device), "float32"),
    }
    sys.stdout.write(f"{json.dumps(report)}\n")
    return 0


def _show(costs: list[StageCost]) -> None:
    table = Table(title="bits per byte, held out")
    for head in ("stage", "tokens", "with a head", "without", "its cost", "agreement by depth"):
        table.add_column(head, justify="right")
    for one in costs:
        table.add_row(
            one.stage,
            f"{one.num_tokens:,}",
            f"{one.bits_per_byte:.4f}",
            f"{one.bits_per_byte_alone:.4f}",
            f"{one.cost:+.2%}",
            " ".join(f"{share:.2f}" for share in one.agreement_per_depth),
        )
    report_console(100).print(table)


if __name__ == "__main__":
    sys.exit(run(app, "benchmarks.head_cost"))
