"""Acceptance lengths as a picture: over K where there are several, else over the temperature."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from outrider.entrypoints.acceptance_sweep import Way
from outrider.errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from outrider.entrypoints.acceptance import AcceptanceRow

PANEL_INCHES = (4.4, 3.4)
# Below the panels.
LEGEND_INCHES = 1.2
_COLOURS = {"standard": "tab:blue", "block": "tab:orange", "coupled": "tab:green"}
_GREEDY_COLOUR = "black"


def check_plot_path(path: Path) -> None:
    """Tells what would fail at the end of a long measurement before it begins.

    Raises:
        ConfigError: the path is no PNG in a folder that is there, it cannot be written, or
            matplotlib is missing.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot writes PNG: give a file that ends in .png, got {path}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: {path.parent} is no folder")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--plot: {path} cannot be written")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'outrider[train]'")


def plot_acceptance(rows: Sequence[AcceptanceRow], path: Path) -> None:
    """Writes `acceptance_figure` as a PNG.

    Raises:
        OutriderError: the file could not be written.
    """
    try:
        acceptance_figure(rows).savefig(path, format="png", dpi=120)
    except OSError as error:
        raise OutriderError(
            f"--plot: {path} could not be written: {error.strerror or error}"
        ) from None


def acceptance_figure(rows: Sequence[AcceptanceRow]) -> Figure:
    """Draws mean acceptance lengths with their intervals, and those of fresh windows dotted.

    Suites are side by side. Where several K were measured the picture is over K and has a line of
    panels for each temperature; else it is over the temperature.

    Args:
        rows: at least one.
    """
    # Without pyplot there is no state of the process and no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    is_over_k = len({row.k for row in rows}) > 1
    suites = list(dict.fromkeys(row.suite for row in rows))
    lines = sorted({row.temperature for row in rows}) if is_over_k else [None]
    width, height = PANEL_INCHES
    size = (width * len(suites), height * len(lines) + LEGEND_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(lines), len(suites), squeeze=False, sharey=True)
    legend: dict[str, Artist] = {}
    for temperature, line in zip(lines, panels, strict=True):
        for suite, axes in zip(suites, line, strict=True):
            own = [row for row in rows if row.suite == suite]
            if temperature is not None:
                own = [row for row in own if row.temperature == temperature]
            _draw(axes, own, is_over_k)
            axes.set_title(
                suite if temperature is None else f"{suite}, temperature {temperature:g}"
            )
            handles, labels = axes.get_legend_handles_labels()
            legend.update(zip(map(str, labels), handles, strict=True))
        line[0].set_ylabel("acceptance length (dotted: fresh)")
    figure.legend([*legend.values()], [*legend], loc="outside lower center", ncols=len(suites))
    return figure


def _draw(axes: Axes, rows: Sequence[AcceptanceRow], is_over_k: bool) -> None:
    """One panel: a line for each way of drafting and judging."""
    lines: dict[Way, dict[float, AcceptanceRow]] = {}
    for row in rows:
        way = Way.of(row)
        # Over temperatures all lines begin at temperature 0, where they are one.
        way = way if is_over_k else replace(way, temperature=1.0)
        place = row.k if is_over_k else row.temperature
        lines.setdefault(replace(way.canonical(), k=0), {}).setdefault(place, row)
    # Side by side, so that their bars can be told apart.
    step = 0.03 if is_over_k else 0.008
    for number, (way, by_place) in enumerate(lines.items()):
        _draw_line(axes, way, by_place, (number - (len(lines) - 1) / 2) * step)
    axes.set_xlabel("drafts per step (K)" if is_over_k else "temperature")
    axes.set_xticks(sorted({place for by_place in lines.values() for place in by_place}))
    axes.grid(alpha=0.3)


def _draw_line(axes: Axes, way: Way, by_place: Mapping[float, AcceptanceRow], shift: float) -> None:
    places = sorted(by_place)
    rows = [by_place[place] for place in places]
    lengths = [row.mean_acceptance_length for row in rows]
    bounds = [row.ci95 or (row.mean_acceptance_length,) * 2 for row in rows]
    below = [length - low for length, (low, _) in zip(lengths, bounds, strict=True)]
    above = [high - length for length, (_, high) in zip(lengths, bounds, strict=True)]
    x = [place + shift for place in places]
    colour = _GREEDY_COLOUR if way.is_greedy else _COLOURS[way.rule]
    is_sampled = way.is_greedy or way.draft_sample_method == "probabilistic"
    axes.errorbar(
        x,
        lengths,
        [below, above],
        fmt="o" if is_sampled else "s",
        ls="-" if is_sampled else "--",
        color=colour,
        markersize=4,
        capsize=3,
        label=_label(way),
    )
    fresh = [row.mean_acceptance_length_fresh for row in rows]
    axes.plot(x, [math.nan if one is None else one for one in fresh], ":", color=colour)


def _label(way: Way) -> str:
    if way.is_greedy:
        return "any rule"
    if way.draft_sample_method == "greedy":
        return f"{'standard = block' if way.rule == 'standard' else way.rule}, one-hot drafts"
    return f"{way.rule}, sampled drafts"
