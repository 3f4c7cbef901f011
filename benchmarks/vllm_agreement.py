"""What the plugin makes vLLM write, judged by our own float32 engine.

Each K has a vLLM engine of its own, in a process of its own. Its greedy texts are read by our
engine (`benchmarks.vllm_judge`), and beside K = 0 stands what drafting adds to, or takes from,
that. From the first difference of two texts on, their tokens come after different ones; so K and
K = 0 are also compared over the tokens that come after the same ones.

    python -m benchmarks.vllm_agreement -k 3 --dtype float32 --prefix-caching
    python -m benchmarks.vllm_agreement -k 3 --engine '{"tensor_parallel_size": 2}'
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.provenance import provenance
from benchmarks.vllm_judge import SCHEMA, Judge
from benchmarks.vllm_process import run_vllm
from benchmarks.vllm_settings import drafting, engine_options
from outrider.entrypoints.cli.options import parse_k_list
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run

app = make_app("benchmarks.vllm_agreement")


@dataclass(frozen=True)
class Agreement:
    """One K.

    Attributes:
        k: drafts per step.
        num_tokens: tokens vLLM wrote.
        num_agreeing: of them, what our engine would have written.
        mean_gap: mean of how far below our engine's choice they lie, in nats.
        largest_gap: the largest of these.
        num_shared: tokens that come after the same tokens as those of K = 0.
        num_shared_agreeing: of them, what our engine would have written.
        num_plain_agreeing: the same of the tokens of K = 0 in these places.
        num_only_wrong: places among them where ours is the token of K = 0 alone.
        num_only_plain_wrong: places among them where ours is the token of this K alone.
        num_same_texts: texts that are token for token those of K = 0.
        num_texts: texts.
        mean_acceptance_length: 1 + accepted / drafts; 1 without drafts.
        num_draft_tokens_missing: K for each window with drafts, less the drafts in them.
        num_cached_tokens: of prompts, taken from the prefix cache.
        seconds_to_start: of vLLM's engine.
        tokens_per_s: all texts together, prompts included.
    """

    k: int
    num_tokens: int
    num_agreeing: int
    mean_gap: float
    largest_gap: float
    num_shared: int
    num_shared_agreeing: int
    num_plain_agreeing: int
    num_only_wrong: int
    num_only_plain_wrong: int
    num_same_texts: int
    num_texts: int
    mean_acceptance_length: float
    num_draft_tokens_missing: int
    num_cached_tokens: int
    seconds_to_start: float
    tokens_per_s: float


@dataclass(frozen=True)
class Comparison:
    """What is decoded, and how.

    Attributes:
        engine: options of vLLM's LLM, without those of drafting.
        suites: bundled sets of prompts.
        num_prompts: of each suite.
        max_tokens: of a text.
        has_schema: texts are JSON of `SCHEMA`.
    """

    engine: dict[str, Any]
    suites: tuple[str, ...] = ("code",)
    num_prompts: int = 8
    max_tokens: int = 48
    has_schema: bool = False

    @property
    def engine_options(self) -> dict[str, Any]:
        """All options of vLLM's LLM."""
        return engine_options(**{"block_size": 64, **self.engine})

    def task(self, prompts: list[list[int]], k: int) -> dict[str, Any]:
        """For `benchmarks.vllm_run`; a second round finds what a first one has cached."""
        engine = {**self.engine_options, **drafting(k)}
        one = {"temperature": 0.0, "max_tokens": self.max_tokens}
        if self.has_schema:
            one["schema"] = SCHEMA
        num_rounds = 2 if engine["enable_prefix_caching"] else 1
        return {"prompts": prompts, "engine": engine, "rounds": [one] * num_rounds}

    def run(self, judge: Judge, ks: Sequence[int]) -> Iterator[Agreement]:
        """Decodes with K = 0, then with each K of a list, and judges it.

        Raises:
            VllmError: vLLM ended with an error.
        """
        prompts = judge.prompts(self.suites, self.num_prompts)
        schema = SCHEMA if self.has_schema else None
        plain: list[tuple[list[int], list[float]]] | None = None
        for k in ks if ks[0] == 0 else (0, *ks):
            outcome = run_vllm(self.task(prompts, k))
            texts = outcome["rounds"][-1]["token_ids"]
            judged = list(zip(texts, judge.gaps(prompts, texts, schema), strict=True))
            plain = judged if plain is None else plain
            yield _agreement(k, judged, plain, outcome)


def _agreement(
    k: int,
    judged: list[tuple[list[int], list[float]]],
    plain: list[tuple[list[int], list[float]]],
    outcome: dict[str, Any],
) -> Agreement:
    """Of the texts of K and of K = 0, each with its gaps."""
    gaps = [gap for _, of_text in judged for gap in of_text]
    shared = [
        (gap, plain_gap)
        for (text, of_text), (plain_text, plain_gaps) in zip(judged, plain, strict=True)
        for gap, plain_gap in list(zip(of_text, plain_gaps, strict=False))[
            : num_shared_places(text, plain_text)
        ]
    ]
    rounds = outcome["rounds"]
    drafts, drafted, accepted, cached = (
        sum(one[name] for one in rounds)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_cached_tokens")
    )
    return Agreement(
        k=k,
        num_tokens=len(gaps),
        num_agreeing=sum(gap == 0 for gap in gaps),
        mean_gap=sum(gaps) / len(gaps),
        largest_gap=max(gaps),
        num_shared=len(shared),
        num_shared_agreeing=sum(gap == 0 for gap, _ in shared),
        num_plain_agreeing=sum(plain_gap == 0 for _, plain_gap in shared),
        num_only_wrong=sum(gap > 0 and plain_gap == 0 for gap, plain_gap in shared),
        num_only_plain_wrong=sum(gap == 0 and plain_gap > 0 for gap, plain_gap in shared),
        num_same_texts=sum(a == b for (a, _), (b, _) in zip(judged, plain, strict=True)),
        num_texts=len(judged),
        mean_acceptance_length=1 + accepted / drafts if drafts else 1.0,
        num_draft_tokens_missing=k * drafts - drafted,
        num_cached_tokens=cached,
        seconds_to_start=outcome["seconds_to_start"],
        tokens_per_s=len(gaps) / rounds[-1]["seconds"],
    )


def num_shared_places(text: Sequence[int], other: Sequence[int]) -> int:
    """In how many places two texts have the same tokens before them, the first difference's too."""
    shortest = min(len(text), len(other))
    differing = (place for place in range(shortest) if text[place] != other[place])
    return next(differing, shortest - 1) + 1


def show(found: Sequence[Agreement], title: str) -> None:
    """Prints the table."""
    table = Table(title=title)
    for heading in (
        "K", "tokens", "agree", "on those of K = 0", "largest gap", "same texts", "acceptance",
        "cached", "start", "tokens/s",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(
            str(row.k),
            str(row.num_tokens),
            f"{row.num_agreeing / row.num_tokens:.2%}",
            f"{row.num_shared_agreeing - row.num_plain_agreeing:+d} of {row.num_shared}",
            f"{row.largest_gap:.1e}",
            f"{row.num_same_texts}/{row.num_texts}",
            f"{row.mean_acceptance_length:.2f}",
            str(row.num_cached_tokens),
            f"{row.seconds_to_start:.0f} s",
            f"{row.tokens_per_s:.0f}",
        )
    report_console().print(table)


@app.command()
def main(
    k: Annotated[
        str, typer.Option("-k", metavar="LIST", help="Drafts per step, beside K = 0.")
    ] = "3",
    dtype: Annotated[str, typer.Option(help="Of vLLM's model.")] = "float32",
    engine: Annotated[str, typer.Option(metavar="JSON", help="More options of vLLM's LLM.")] = "{}",
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching", help="Send all prompts twice, the cache on.")
    ] = False,
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Hold the texts to a schema; drafts are cut.")
    ] = False,
    suite: Annotated[str, typer.Option(metavar="LIST", help="Bundled sets of prompts.")] = "code",
    num_prompts: Annotated[int, typer.Option(metavar="N", help="Prompts of each suite.")] = 8,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens a text.")] = 48,
) -> int:
    """Compare what vLLM writes with our own engine, for each K."""
    comparison = Comparison(
        {"dtype": dtype, "enable_prefix_caching": prefix_caching, **json.loads(engine)},
        tuple(suite.split(",")),
        num_prompts,
        max_tokens,
        json_schema,
    )
    found = list(comparison.run(Judge(), [0, *parse_k_list(k)]))
    label = " ".join(
        [dtype, engine, *["prefix caching"] * prefix_caching, *["schema"] * json_schema]
    )
    show(found, label)
    typer.echo(
        json.dumps(
            {
                "layout": comparison.engine_options,
                "schema": json_schema,
                "results": [asdict(row) for row in found],
                "provenance": provenance("cpu", dtype),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.vllm_agreement"))
