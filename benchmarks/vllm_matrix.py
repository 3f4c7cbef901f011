"""Agreement with our own engine over the ways to run vLLM: the rows of `make verify-vllm`.

Each row is one engine of vLLM: an entry of `ENTRIES` at one K. It is written to the report when it
is done. A row that is there already, of the same source (`source_id`) and settings and without a
fault, is not run again, so the matrix may be run in pieces.

    python -m benchmarks.vllm_matrix                      # all that is missing
    python -m benchmarks.vllm_matrix --minutes 20         # no row begins after that
    python -m benchmarks.vllm_matrix --only "TP2; TP2 + EP" --quick --report /tmp/tried.jsonl
"""

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.provenance import provenance
from benchmarks.vllm_agreement import Agreement, Comparison
from benchmarks.vllm_faults import faults
from benchmarks.vllm_judge import ForbiddenTokenError, Judge
from benchmarks.vllm_process import VllmError, run_vllm
from outrider.bundled import BUNDLED_SUITES
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.errors import ConfigError

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "verify-vllm.jsonl"
# Files that decide what a row says: the texts, their judge, and what is a fault.
DECIDING = (
    "constraints-vllm.txt",
    *(
        f"benchmarks/vllm_{name}.py"
        for name in ("agreement", "faults", "judge", "process", "run", "settings")
    ),
    "src/outrider/*.py",
    *(
        f"src/outrider/{folder}/**/*"
        for folder in (
            "bundled", "cache", "config", "engine", "layers", "models", "ops", "sampling",
            "spec_decode", "vllm_plugin",
        )
    ),
    *(
        f"src/outrider/entrypoints/{name}.py"
        for name in (
            "cli/prompt_sources", "decode_run", "front_end", "llm", "output_processor",
            "prompt_encoder",
        )
    ),
    "src/outrider/training/prompts.py",  # which of the held-out prompts
)  # fmt: skip

TP2: dict[str, Any] = {"tensor_parallel_size": 2}
DP2: dict[str, Any] = {"data_parallel_size": 2}
TP4: dict[str, Any] = {"tensor_parallel_size": 4}
EP: dict[str, Any] = {"enable_expert_parallel": True}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
PREFIX: dict[str, Any] = {"enable_prefix_caching": True}
PIECES: dict[str, Any] = {"max_num_batched_tokens": 48}
# The rest of it is in the row already, or is not the row's.
_PROVENANCE = ("git_sha", "versions", "device_name", "threads", "date")

app = make_app("benchmarks.vllm_matrix")


@dataclass(frozen=True)
class Entry:
    """One way to run vLLM.

    Attributes:
        name: of the way.
        comparison: what is decoded.
        ks: drafts per step, K = 0 among them.
        refusal: what the error of a way that vLLM refuses names, None where it runs.
    """

    name: str
    comparison: Comparison
    ks: tuple[int, ...] = (0, 1, 3, 5)
    refusal: str | None = None

    def quick(self) -> "Entry":
        """The same way with as little text, and as few K, as show that it runs."""
        comparison = replace(self.comparison, num_prompts=1, max_tokens=8)
        return replace(self, comparison=comparison, ks=tuple(sorted({self.ks[0], self.ks[-1]})))

    def settings(self, k: int) -> dict[str, Any]:
        """What tells its rows from those of other entries, as they are in the report."""
        comparison = asdict(self.comparison)
        return {"entry": self.name, **comparison, "suites": [*self.comparison.suites], "k": k}


def _few(engine: dict[str, Any], **others: Any) -> Comparison:
    """For workers that share two cores."""
    return Comparison(engine, num_prompts=4, max_tokens=32, **others)


def _many(engine: dict[str, Any]) -> Comparison:
    """For a dtype in which a text may differ, at most once in a way that tells of K."""
    return Comparison(engine, tuple(BUNDLED_SUITES))


ENTRIES = (
    Entry("TP1", Comparison({})),
    Entry("TP1, prefix caching", Comparison(PREFIX)),
    Entry("TP1, prompts in pieces", Comparison(PIECES)),
    Entry("TP1, JSON schema", Comparison({}, ("json",), has_schema=True)),
    Entry("TP2", _few(TP2)),
    Entry("TP2 + EP", _few({**TP2, **EP})),
    Entry("PP2", _few(PP2), (3,), refusal="pipeline_parallel_size=1"),
    Entry("TP1, bfloat16", _many({"dtype": "bfloat16"})),
    Entry("DP2 + EP", _few({**DP2, **EP})),
    Entry("TP2 x DP2", _few({**TP2, **DP2}), (0, 3)),
    Entry("TP2 x DP2, EP over 4", _few({**TP2, **DP2, **EP}), (0, 3)),
    Entry("TP4, EP over 4", _few({**TP4, **EP}), (0, 3)),
    Entry("DP2", _few(DP2)),
    Entry("TP2 + EP, prefix caching, pieces", _few({**TP2, **EP, **PREFIX, **PIECES}), (0, 3)),
    Entry("DP2 + EP, JSON schema", _few({**DP2, **EP}, suites=("json",), has_schema=True), (0, 3)),
    Entry("TP1, bfloat16, prefix caching", _many({"dtype": "bfloat16", **PREFIX})),
)  # fmt: skip


def run_entry(entry: Entry, judge: Judge, ks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of an entry, as they are in the report: of K = 0 first, whether it is asked for or not.

    A K that vLLM fails with ends the entry, with the failure as the row's fault.
    """
    budget = entry.comparison.engine_options.get("max_num_batched_tokens")
    prompts = judge.prompts(entry.comparison.suites, entry.comparison.num_prompts)
    if budget is not None and max(map(len, prompts)) <= 2 * budget:
        raise ConfigError(f"{entry.name}: no prompt takes several pieces")
    plain: Agreement | None = None
    wanted = ks if ks[0] == 0 else (0, *ks)
    results = entry.comparison.run(judge, wanted)
    for k in wanted:
        started = time.monotonic()
        try:
            found = next(results)
            plain = found if plain is None else plain
            row = {
                **entry.settings(k),
                **asdict(found),
                "faults": faults(entry.comparison, found, plain),
            }
        except (VllmError, ForbiddenTokenError) as error:
            sys.stderr.write(f"{error}\n")
            reason = error.reason if isinstance(error, VllmError) else str(error)
            row = {**entry.settings(k), "faults": [reason or "vLLM failed"]}
        yield {**row, "seconds": round(time.monotonic() - started)}
        if plain is None or "num_tokens" not in row:
            return


def run_refused(entry: Entry, judge: Judge) -> Iterator[dict[str, Any]]:
    """The row of an entry that vLLM is to refuse by a name."""
    (k,) = entry.ks
    started = time.monotonic()
    prompts = judge.prompts(entry.comparison.suites, 1)
    try:
        run_vllm(entry.comparison.task(prompts, k))
        told = "it runs"
    except VllmError as error:
        told = error.reason
    assert entry.refusal is not None, "an entry that runs is judged"
    wrong = [] if entry.refusal in told else [f"not refused by the name {entry.refusal}"]
    seconds = round(time.monotonic() - started)
    yield {**entry.settings(k), "refusal": told, "faults": wrong, "seconds": seconds}


class Report:
    """The rows of a file, one of each settings; what is written is in the file at once.

    Args:
        path: of the file.
        source: what the rows must be of to count as done.
    """

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def is_done(self, settings: dict[str, Any]) -> bool:
        """Whether a row with these settings is there, of the same source and without a fault."""
        return any(
            settings.items() <= row.items() and row["source"] == self._source and not row["faults"]
            for row in self.rows
        )

    def write(self, row: dict[str, Any]) -> None:
        """Adds a row, in place of one with the same entry and K."""
        name = (row["entry"], row["k"])
        order = {entry.name: place for place, entry in enumerate(ENTRIES)}
        kept = [one for one in self.rows if (one["entry"], one["k"]) != name]
        dtype = row["engine"].get("dtype", "float32")
        found = provenance("cpu", dtype)
        where = {name: found[name] for name in _PROVENANCE}
        added = {**row, "source": self._source, **where}
        # What is no longer an entry goes last.
        self.rows = sorted(
            [*kept, added], key=lambda one: (order.get(one["entry"], len(order)), one["k"])
        )
        written = self._path.with_suffix(".part")
        written.write_text("".join(f"{json.dumps(one)}\n" for one in self.rows))
        written.replace(self._path)


def source_id(root: Path = ROOT) -> str:
    """Of the files of `DECIDING` as they lie there, whether git knows them or not.

    What no row depends on is left out: the server and its page, the command line, the grammars of
    our own engine (the judge has vLLM's), training itself, and the list of ways, since a row holds
    its settings.
    """
    paths = {path for pattern in DECIDING for path in root.glob(pattern) if path.is_file()}
    content = sha256()
    for path in sorted(paths):
        if path.parent.name != "__pycache__":
            name = path.relative_to(root).as_posix()
            content.update(f"{name} {sha256(path.read_bytes()).hexdigest()}\n".encode())
    return content.hexdigest()[:24]


def show(rows: Iterable[dict[str, Any]]) -> None:
    """Prints the table."""
    table = Table(title="vLLM with the plugin, judged by the float32 engine")
    for heading in (
        "way", "K", "tokens", "agree", "of K = 0's", "gap", "accept", "cached", "fault",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("way", "fault") else "right")
    for row in rows:
        figures = [""] * 6
        if "num_tokens" in row:
            difference = row["num_shared_agreeing"] - row["num_plain_agreeing"]
            figures = [
                str(row["num_tokens"]),
                f"{row['num_agreeing'] / row['num_tokens']:.2%}",
                f"{difference:+d} of {row['num_shared']}",
                f"{row['largest_gap']:.0e}",
                f"{row['mean_acceptance_length']:.2f}",
                str(row["num_cached_tokens"]),
            ]
        remark = "; ".join(row["faults"]) or ("refused" if "refusal" in row else "none")
        table.add_row(row["entry"], str(row["k"]), *figures, remark)
    report_console().print(table)


def chosen(names: str | None) -> list[Entry]:
    """The entries of a list of names, all of them without one."""
    if names is None:
        return [*ENTRIES]
    by_name = {entry.name: entry for entry in ENTRIES}
    wanted = [name.strip() for name in names.split(";")]
    for name in wanted:
        if name not in by_name:
            raise ConfigError(f"--only: {name!r} is none of {'; '.join(by_name)}")
    return [by_name[name] for name in wanted]


def run_missing(entries: Sequence[Entry], report: Report, judge: Judge, deadline: float) -> None:
    """Runs the rows that are not done, and writes each; none begins after the deadline."""
    for entry in entries:
        missing = [k for k in entry.ks if not report.is_done(entry.settings(k))]
        if not missing or time.monotonic() > deadline:
            continue
        sys.stderr.write(f"{entry.name}: K = {', '.join(map(str, missing))}\n")
        refused = entry.refusal is not None
        rows = run_refused(entry, judge) if refused else run_entry(entry, judge, missing)
        for row in rows:
            report.write(row)
            sys.stderr.write(
                f"  K = {row['k']}, {row['seconds']} s: {'; '.join(row['faults']) or 'no fault'}\n"
            )
            if time.monotonic() > deadline:
                break


@app.command()
def main(
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Ways to run, between semicolons; else all.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Only the least and most drafts, little text; needs a --report of its own.",
        ),
    ] = False,
    minutes: Annotated[
        float, typer.Option(metavar="N", help="After which no further row begins.")
    ] = math.inf,
    report: Annotated[Path, typer.Option(metavar="FILE", help="Where the rows are.")] = REPORT,
) -> int:
    """Run the rows of the matrix that are missing."""
    if quick and report == REPORT:
        raise ConfigError("--quick says nothing of agreement: give it a --report of its own")
    entries = [entry.quick() if quick else entry for entry in chosen(only)]
    written = Report(report, source_id())
    run_missing(entries, written, Judge(), time.monotonic() + 60 * minutes)
    names = {entry.name for entry in entries}
    rows = [row for row in written.rows if row["entry"] in names]
    show(rows)
    num_missing = sum(not written.is_done(entry.settings(k)) for entry in entries for k in entry.ks)
    typer.echo(json.dumps({"num_rows": len(rows), "num_missing_or_faulty": num_missing}))
    return 1 if num_missing else 0


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.vllm_matrix"))
