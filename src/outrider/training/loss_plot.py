"""The curves of a run as a picture, drawn from its log after each evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError
from outrider.training.run_log import LOG_FILE, read_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from outrider.training.schedule import Progress

_SIZE_INCHES = (10.0, 6.0)
# A point of a training curve is the mean of so many records at most, so that it can be read.
_MAX_POINTS = 300


class LossPlot:
    """Listens to a run and draws its log: losses of trunk and head, held-out bits per byte.

    Args:
        path: the PNG to write, beside the log; it is replaced as a whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step(self, progress: Progress, fraction: float, num_tokens_per_s: float) -> None:
        """Draws nothing."""

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Draws after an evaluation."""
        if record["kind"] == "eval":
            plot_losses(read_log(self._path.with_name(LOG_FILE)), self._path)


def plot_losses(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws training and held-out curves over the tokens seen.

    Args:
        records: of a log, in order.
        path: the PNG to write.

    Raises:
        OutriderError: the file could not be written.
    """
    # Without pyplot there is no state of the process and no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    training, held_out = figure.subplots(1, 2)
    train = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    _draw(training, "training: loss (head: loss.kind)", "", _thinned(train), "trunk", "depths")
    _draw(
        held_out, "held out: loss", "nats a token", evaluations, "trunk_loss", "depth_losses", "o-"
    )
    if evaluations:
        held_out.set_title(f"held out: loss ({evaluations[-1]['bits_per_byte']:.3f} bits a byte)")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=100)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutriderError(
            f"{path}: the plot could not be written ({error.strerror or error})"
        ) from error


def _draw(
    axes: Axes,
    title: str,
    unit: str,
    records: Sequence[Mapping[str, Any]],
    trunk: str,
    depths: str,
    style: str = "-",
) -> None:
    num_tokens = [record["num_tokens"] / 1e6 for record in records]
    axes.plot(num_tokens, [record[trunk] for record in records], style, label="trunk")
    num_depths = min((len(record[depths]) for record in records), default=0)
    for depth in range(num_depths):
        axes.plot(
            num_tokens,
            [record[depths][depth] for record in records],
            style,
            label=f"head, depth {depth}",
        )
    axes.set_title(title)
    axes.set_xlabel("million tokens")
    axes.set_ylabel(unit)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(alpha=0.3)
    axes.legend()


def _thinned(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means of neighbouring records, so few that a curve can be read."""
    size = -(-len(records) // _MAX_POINTS) or 1
    groups = [records[start : start + size] for start in range(0, len(records), size)]
    return [
        {
            "num_tokens": group[-1]["num_tokens"],
            "trunk": _mean([record["trunk"] for record in group]),
            "depths": [
                _mean(losses)
                for losses in zip(*(record["depths"] for record in group), strict=False)
            ],
        }
        for group in groups
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
