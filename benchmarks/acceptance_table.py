"""The JSON of `outrider bench acceptance` as tables of Markdown, K side by side.

Several files are one page, so that suites may be measured apart:

    outrider bench acceptance --suite code -k 1-5 --json > code.json
    outrider bench acceptance --suite json -k 1-5 --json > json.json
    python -m benchmarks.acceptance_table code.json json.json

Ways that are one (all of temperature 0; `block` and `standard` with one-hot drafts) stand in one
line.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.entrypoints.acceptance import AcceptanceRow
from outrider.entrypoints.acceptance_sweep import AcceptanceGain, AcceptanceIntervals, Way
from outrider.entrypoints.cli.acceptance_table import drafts_and_rules, with_interval
from outrider.entrypoints.cli.run import make_app, run
from outrider.errors import ConfigError

app = make_app("benchmarks.acceptance_table")


@dataclass(frozen=True)
class Report:
    """What was measured.

    Attributes:
        rows: by way.
        intervals: of the rows, in their order.
        gains: of `block`.
        settings: model, max_tokens, seed and what else all of it has in common.
    """

    rows: list[AcceptanceRow]
    intervals: list[AcceptanceIntervals]
    gains: list[AcceptanceGain]
    settings: dict[str, Any]

    @classmethod
    def from_file(cls, path: Path) -> "Report":
        """The last line of a file, as the command has printed it.

        Raises:
            ConfigError: the file cannot be read, or its last line is something else.
        """
        try:
            report = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
            read = cls(
                [AcceptanceRow(**row) for row in report["rows"]],
                [AcceptanceIntervals(**one) for one in report["intervals"]],
                [AcceptanceGain(**gain) for gain in report["gains"]],
                dict(report["settings"]),
            )
            # Whatever is no number, or of another row, fails here.
            for k in [read.rows[0].k, *{row.k for row in read.rows}]:
                read.tables(k)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{path}: no report of outrider bench acceptance") from None
        return read

    @classmethod
    def joined(cls, reports: list["Report"]) -> "Report":
        """Several reports as one.

        Raises:
            ConfigError: they are of different settings, or have measured the same.
        """
        first = reports[0]
        for report in reports:
            for name, value in report.settings.items():
                if value != first.settings.get(name):
                    raise ConfigError(
                        f"reports of different {name}: {first.settings.get(name)} and {value}"
                    )
        rows = [row for report in reports for row in report.rows]
        told: set[Way] = set()
        for way in map(Way.of, rows):
            if way in told:
                raise ConfigError(
                    f"{way.suite} at K = {way.k} and temperature {way.temperature:g} is in the "
                    "reports twice"
                )
            told.add(way)
        return cls(
            rows,
            [one for report in reports for one in report.intervals],
            [gain for report in reports for gain in report.gains],
            first.settings,
        )

    def tables(self, k: int) -> list[str]:
        """The tables there are: lengths by K, all figures of `k`, and gains of `block`.

        Args:
            k: drafts of the second table.

        Raises:
            ConfigError: nothing was measured with so many drafts.
        """
        ks = sorted({row.k for row in self.rows})
        if k not in ks:
            raise ConfigError(f"-k must be one of {', '.join(map(str, ks))}, got {k}")
        tables = [self._lengths(ks), self._intervals(k), self._gains() if self.gains else ""]
        return [table for table in tables if table]

    def _lengths(self, ks: list[int]) -> str:
        """Mean acceptance lengths over fresh windows and, behind it, over all."""
        cells: dict[Way, dict[int, str]] = {}
        for row in self.rows:
            fresh = with_interval(row.mean_acceptance_length_fresh, None)
            length = f"{fresh} / {row.mean_acceptance_length:.2f}"
            cells.setdefault(_line(row), {})[row.k] = length
        return _table(
            ["suite", "T", "drafts", "rule", *(f"K = {k}" for k in ks)],
            [
                [*self._named(line), *(lengths.get(k, "") for k in ks)]
                for line, lengths in cells.items()
            ],
        )

    def _intervals(self, k: int) -> str:
        lines: dict[Way, list[str]] = {}
        for row, intervals in zip(self.rows, self.intervals, strict=True):
            line = _line(row)
            if row.k == k and line not in lines:
                fresh = row.mean_acceptance_length_fresh
                lines[line] = [
                    *self._named(line),
                    str(row.prompts),
                    with_interval(fresh, intervals.mean_acceptance_length_fresh),
                    with_interval(row.mean_acceptance_length, row.ci95),
                    " ".join(f"{rate:.2f}" for rate in row.acceptance_rate_per_pos),
                    f"{row.repeated_share:.0%}",
                ]
        heads = ["suite", "T", "drafts", "rule", "prompts", "fresh windows", "all windows"]
        table = _table([*heads, "by position", "repeated"], list(lines.values()))
        return f"K = {k}, 95 % intervals over prompts:\n\n{table}"

    def _gains(self) -> str:
        return _table(
            ["suite", "T", "K", "prompts", "block beyond standard"],
            [
                [
                    gain.suite,
                    f"{gain.temperature:g}",
                    str(gain.k),
                    str(gain.prompts),
                    with_interval(gain.gain, gain.ci95, "+.3f"),
                ]
                for gain in self.gains
            ],
        )

    def _named(self, line: Way) -> list[str]:
        rules = dict.fromkeys(row.rule for row in self.rows if _line(row) == line)
        return [line.suite, f"{line.temperature:g}", *drafts_and_rules(line, rules)]


def _line(row: AcceptanceRow) -> Way:
    """What the rows of one line have in common, which is not their K."""
    return replace(Way.of(row).canonical(), k=0)


def _table(heads: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *lines])


@app.command()
def acceptance_table(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Reports, as JSON.")],
    *,
    k: Annotated[int, typer.Option("-k", metavar="K", help="Drafts of the second table.")] = 3,
) -> int:
    """Print reports of outrider bench acceptance as tables of Markdown."""
    report = Report.joined([Report.from_file(path) for path in files])
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    sys.stdout.write("\n\n".join([settings, *report.tables(k)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run(app, "benchmarks.acceptance_table"))
