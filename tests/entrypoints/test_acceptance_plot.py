"""The picture: a line for each way, at the lengths of its rows, and equal ways once."""

from itertools import product

import pytest
from matplotlib.axes import Axes

from outrider.entrypoints.acceptance import AcceptanceRow
from outrider.entrypoints.acceptance_plot import acceptance_figure

LABELS = [
    "standard, sampled drafts",
    "block, sampled drafts",
    "coupled, sampled drafts",
    "standard = block, one-hot drafts",
    "coupled, one-hot drafts",
]


def row(suite: str, k: int, temperature: float, method: str, rule: str) -> AcceptanceRow:
    length = 1 + k / 2 - temperature / 4
    return AcceptanceRow(
        suite=suite,
        k=k,
        temperature=temperature,
        rule=rule,
        draft_sample_method=method,
        prompts=9,
        mean_acceptance_length=length,
        ci95=(length - 0.2, length + 0.1),
        mean_acceptance_length_fresh=None if k == 1 else length - 0.3,
        acceptance_rate=0.5,
        acceptance_rate_per_pos=[0.5] * k,
        repeated_share=0.1,
    )


def rows(suites: list[str], ks: list[int], temperatures: list[float]) -> list[AcceptanceRow]:
    methods, rules = ["probabilistic", "greedy"], ["standard", "block", "coupled"]
    return [row(*way) for way in product(suites, ks, temperatures, methods, rules)]


def labels(axes: Axes) -> list[str]:
    return [str(label) for label in axes.get_legend_handles_labels()[1]]


def test_over_the_temperature_where_there_is_one_k() -> None:
    figure = acceptance_figure(rows(["code", "json"], [3], [0.0, 1.0]))
    assert [axes.get_title() for axes in figure.axes] == ["code", "json"]
    for axes in figure.axes:
        assert labels(axes) == LABELS
        assert [float(tick) for tick in axes.get_xticks()] == [0, 1]
        for bars in axes.containers:
            line, _, (bar,) = bars.lines  # type: ignore[attr-defined]
            assert line.get_xdata() == pytest.approx([0, 1], abs=0.02)
            assert list(line.get_ydata()) == [2.5, 2.25]
            ends = [end for _, end in bar.get_segments()[0]]
            assert ends == pytest.approx([2.3, 2.6])
        fresh = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert [list(line.get_ydata()) for line in fresh] == [[2.2, 1.95]] * len(LABELS)  # type: ignore[arg-type]


def test_over_k_where_there_are_several() -> None:
    figure = acceptance_figure(rows(["code"], [1, 2], [0.0, 1.0]))
    greedy, warm = figure.axes
    assert [axes.get_title() for axes in (greedy, warm)] == [
        "code, temperature 0",
        "code, temperature 1",
    ]
    assert labels(greedy) == ["any rule"]
    assert labels(warm) == LABELS
    for axes, lengths in ((greedy, [1.5, 2.0]), (warm, [1.25, 1.75])):
        assert [int(tick) for tick in axes.get_xticks()] == [1, 2]
        for bars in axes.containers:
            line = bars.lines[0]  # type: ignore[attr-defined]
            assert line.get_xdata() == pytest.approx([1, 2], abs=0.1)
            assert list(line.get_ydata()) == lengths


def test_only_what_was_measured() -> None:
    (axes,) = acceptance_figure([row("code", 3, 1.0, "greedy", "block")]).axes
    assert labels(axes) == ["standard = block, one-hot drafts"]
    (axes,) = acceptance_figure([row("code", 3, 0.0, "probabilistic", "coupled")]).axes
    assert len(labels(axes)) == 1
