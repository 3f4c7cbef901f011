"""The JSON of `outrider bench acceptance` as a page of Markdown: K side by side, a line for a way.

Several files are one table, so that suites may be measured apart:

    outrider bench acceptance --suite code -k 1-5 --json > code.json
    python -m benchmarks.acceptance_table code.json json.json

Ways that are one (all of temperature 0; `block` and `standard` with one-hot drafts) stand in one
line.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.entrypoints.cli.acceptance_table import with_interval
from outrider.entrypoints.cli.run import make_app, run
from outrider.errors import ConfigError

_DRAFTS = {"probabilistic": "sampled", "greedy": "one-hot"}

app = make_app("benchmarks.acceptance_table")


def lengths_table(reports: list[dict[str, Any]]) -> str:
    """Mean acceptance lengths, over fresh windows and, behind it, over all.

    Args:
        reports: what the command printed, each with `rows`.
    """
    ks = sorted({row["k"] for report in reports for row in report["rows"]})
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for report in reports:
        for row in report["rows"]:
            fresh = row["mean_acceptance_length_fresh"]
            length = f"{with_interval(fresh, None)} / {row['mean_acceptance_length']:.2f}"
            cells.setdefault(_way(row), {})[row["k"]] = length
    lines = [
        f"| suite | T | drafts, rule | {' | '.join(f'K = {k}' for k in ks)} |",
        f"|{'---|' * (3 + len(ks))}",
    ]
    for way, lengths in cells.items():
        lines.append(f"| {' | '.join([*way, *(lengths.get(k, '') for k in ks)])} |")
    return "\n".join(lines)


def intervals_table(reports: list[dict[str, Any]], k: int) -> str:
    """All figures of one K, with their 95 % intervals.

    Args:
        reports: as for `lengths_table`, each with `intervals` in the order of its rows.
        k: drafts per step.
    """
    lines = [
        "| suite | T | drafts, rule | fresh windows | all windows | by position | repeated |",
        f"|{'---|' * 7}",
    ]
    told: set[tuple[str, str, str]] = set()
    for report in reports:
        for row, intervals in zip(report["rows"], report["intervals"], strict=True):
            way = _way(row)
            if row["k"] != k or way in told:
                continue
            told.add(way)
            fresh, name = row["mean_acceptance_length_fresh"], "mean_acceptance_length_fresh"
            cells = [
                *way,
                with_interval(fresh, intervals[name]),
                with_interval(row["mean_acceptance_length"], row["ci95"]),
                " ".join(f"{rate:.2f}" for rate in row["acceptance_rate_per_pos"]),
                f"{row['repeated_share']:.0%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gains_table(reports: list[dict[str, Any]]) -> str:
    """What `block` accepts beyond `standard`, of sampled drafts.

    Args:
        reports: as for `lengths_table`, each with `gains`.
    """
    lines = ["| suite | T | K | prompts | block beyond standard |", f"|{'---|' * 5}"]
    for report in reports:
        for gain in report["gains"]:
            lines.append(
                f"| {gain['suite']} | {gain['temperature']:g} | {gain['k']} | {gain['prompts']} | "
                f"{with_interval(gain['gain'], gain['ci95'], '+.3f')} |"
            )
    return "\n".join(lines)


def _way(row: dict[str, Any]) -> tuple[str, str, str]:
    drafts, rule = _DRAFTS[row["draft_sample_method"]], row["rule"]
    if row["temperature"] == 0:
        way = "any"
    elif drafts == "one-hot" and rule != "coupled":
        way = "one-hot, standard or block"
    else:
        way = f"{drafts}, {rule}"
    return row["suite"], f"{row['temperature']:g}", way


def read_report(path: Path) -> dict[str, Any]:
    """The last line of a file, as the command has printed it.

    Raises:
        ConfigError: the file cannot be read, or its last line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        report = json.loads(lines[-1])
    except (OSError, UnicodeDecodeError, ValueError, IndexError):
        report = None
    if not isinstance(report, dict) or not {"rows", "intervals", "gains"} <= report.keys():
        raise ConfigError(f"{path}: no report of outrider bench acceptance")
    return report


@app.command()
def acceptance_table(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Reports, as JSON.")],
    *,
    k: Annotated[int, typer.Option("-k", metavar="K", help="Drafts of the second table.")] = 3,
) -> int:
    """Print reports of outrider bench acceptance as tables of Markdown."""
    reports = [read_report(path) for path in files]
    tables = [lengths_table(reports), intervals_table(reports, k), gains_table(reports)]
    sys.stdout.write("\n\n".join(tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run(app, "benchmarks.acceptance_table"))
