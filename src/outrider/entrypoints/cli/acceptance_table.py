"""What a sweep has measured, for people: ways that are one stand in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from outrider.entrypoints.acceptance_sweep import Way
from outrider.entrypoints.cli.report import report_console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outrider.entrypoints.acceptance import Interval
    from outrider.entrypoints.acceptance_sweep import AcceptanceGain, SweepResult

# Of the table in a file or a pipe.
REPORT_WIDTH = 130
_DRAFTS = {"probabilistic": "sampled", "greedy": "one-hot"}
_ANY = "any"


def show_acceptance(result: SweepResult, title: str) -> None:
    """Prints a table of all rows, and a line for each gain, on stdout.

    Args:
        result: of the sweep.
        title: of the table, in which T is the temperature.
    """
    table = Table(title=title)
    for heading in ("suite", "K", "T", "drafts", "rule"):
        table.add_column(heading, no_wrap=heading != "rule")
    for heading in ("length", "length, fresh", "rate", "by position", "repeated"):
        table.add_column(heading, justify="right", no_wrap=heading != "repeated")
    rules: dict[Way, list[str]] = {}
    for row in result.rows:
        rules.setdefault(Way.of(row).canonical(), []).append(row.rule)
    for row, intervals in zip(result.rows, result.intervals, strict=True):
        way = Way.of(row)
        own_rules = dict.fromkeys(rules.pop(way.canonical(), ()))
        if not own_rules:
            continue
        table.add_row(
            row.suite,
            str(row.k),
            f"{row.temperature:g}",
            *drafts_and_rules(way, own_rules),
            with_interval(row.mean_acceptance_length, row.ci95),
            with_interval(row.mean_acceptance_length_fresh, intervals.mean_acceptance_length_fresh),
            f"{row.acceptance_rate:.1%}",
            " ".join(
                _with_half_width(rate, interval)
                for rate, interval in zip(
                    row.acceptance_rate_per_pos, intervals.acceptance_rate_per_pos, strict=True
                )
            ),
            f"{row.repeated_share:.1%}",
        )
    console = report_console(REPORT_WIDTH)
    console.print(table)
    for gain in result.gains:
        console.print(_gain(gain), highlight=False)


def drafts_and_rules(way: Way, rules: Iterable[str]) -> tuple[str, str]:
    """How the drafts of a way were drawn, and the rules that are one for it, in words.

    Args:
        way: any.
        rules: that were asked for and give the same texts as the way's own.
    """
    if way.is_greedy:
        return _ANY, _ANY
    return _DRAFTS[way.draft_sample_method], ", ".join(rules)


def with_interval(value: float | None, interval: Interval | None, style: str = ".2f") -> str:
    """A figure and its interval in the form `style`, as much of them as there is."""
    if value is None:
        return "-"
    if interval is None:
        return f"{value:{style}}"
    return f"{value:{style}} ({interval[0]:{style}} to {interval[1]:{style}})"


def _with_half_width(value: float, interval: Interval | None) -> str:
    if interval is None:
        return f"{value:.2f}"
    return f"{value:.2f}±{(interval[1] - interval[0]) / 2:.2f}"


def _gain(gain: AcceptanceGain) -> str:
    return (
        f"{gain.rule} against {gain.against}, {gain.suite}, K = {gain.k}, temperature "
        f"{gain.temperature:g}: {with_interval(gain.gain, gain.ci95, '+.3f')} on the same "
        f"{gain.prompts} prompts"
    )
