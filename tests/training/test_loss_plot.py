"""The picture of a log: what its curves go through, and when it is drawn."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from outrider.errors import OutriderError
from outrider.training.loss_plot import LossPlot, plot_losses
from outrider.training.run_log import RunLog


def train(step: int, loss: float, depths: tuple[float, ...] = ()) -> dict[str, Any]:
    tokens = step * 1_000_000
    return {
        "kind": "train",
        "step": step,
        "num_tokens": tokens,
        "trunk": loss,
        "depths": list(depths),
    }


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "num_tokens": step * 1_000_000,
        "trunk_loss": loss,
        "bits_per_byte": loss / 2,
        "depth_losses": [loss + 1],
    }


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def curves(figure: Figure, axes: int) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in line.get_xydata()]
        for line in figure.axes[axes].lines
    }


def test_curves_of_trunk_and_depths(tmp_path: Path, drawn: list[Figure]) -> None:
    records = [
        train(1, 8.0, (8.5, 9.0)),
        evaluation(1, 7.0),
        train(2, 6.0, (6.5, 7.0)),
        evaluation(2, 5.0),
    ]
    plot_losses(records, tmp_path / "loss.png")
    assert curves(drawn[0], 0) == {
        "trunk": [(1, 8), (2, 6)],
        "head, depth 0": [(1, 8.5), (2, 6.5)],
        "head, depth 1": [(1, 9), (2, 7)],
    }
    assert curves(drawn[0], 1) == {"trunk": [(1, 7), (2, 5)], "head, depth 0": [(1, 8), (2, 6)]}
    assert drawn[0].axes[1].get_title() == "held out: loss (2.500 bits a byte)"


def test_a_long_curve_is_a_curve_of_means(tmp_path: Path, drawn: list[Figure]) -> None:
    records = [train(step, float(step % 2)) for step in range(1, 601)]
    plot_losses(records, tmp_path / "loss.png")
    (points,) = curves(drawn[0], 0).values()
    assert points == [(step, 0.5) for step in range(2, 601, 2)]


def test_it_is_drawn_at_evaluations_and_replaced_whole(tmp_path: Path, drawn: list[Figure]) -> None:
    log, plot = RunLog(tmp_path / "log.jsonl", 0), LossPlot(tmp_path / "loss.png")
    for record in (train(1, 5.0), evaluation(1, 5.0), train(2, 4.0), evaluation(2, 4.0)):
        plot.on_record(log.write(record))
    assert [len(curves(figure, 1)["trunk"]) for figure in drawn] == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "loss.png"}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match=r"loss\.png: the plot could not be written \(No such"):
        plot_losses([evaluation(1, 5.0)], tmp_path / "absent" / "loss.png")
