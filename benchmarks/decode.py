"""Tokens per second with K drafts a step against K = 0.

Every K has an engine of its own over the same weights, K = 0 without any part of drafting. One
round decodes the same held-out prompts with each K, K = 0 among them, in an order that turns from
round to round, so that a machine that slows down slows all alike. Only steps that do nothing but
decode are timed (`DecodeSpeed`): prompts are not, and neither is a warm-up before the first round.

The table has the median over the rounds and their range. The speed-up is the median of each round's
ratio to its own K = 0. The mean acceptance length beside it is its bound.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.options import parse_sizes
from benchmarks.provenance import provenance
from outrider.bundled import BUNDLED_PROMPTS
from outrider.entrypoints.cli.options import (
    Options,
    parse_k_list,
    speculative_options,
    takes_engine_options,
)
from outrider.entrypoints.cli.prompt_sources import PROMPTS_HELP, read_prompts_file
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.entrypoints.decode_run import DecodeRun, DecodeSpeed
from outrider.entrypoints.llm import LLM
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.metrics import SpecDecodeMetrics
from outrider.training.prompts import spread_evenly

NUM_WARM_UP_TOKENS = 16
# Every round runs its prompts, whatever the rounds before it have run.
_RUNS_EVERYTHING = {"enable_prefix_caching": False}

app = make_app("benchmarks.decode")


@dataclass
class Measurement:
    """One K at one batch size.

    Attributes:
        k: drafts per step.
        batch_size: prompts decoded at once.
        rounds: speed of each round.
        metrics: what drafting brought, over all rounds.
        token_ids: the outputs of the last round, in the order of the prompts.
    """

    k: int
    batch_size: int
    rounds: list[DecodeSpeed] = field(default_factory=list)
    metrics: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    token_ids: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> list[float]:
        """Of each round."""
        return [speed.tokens_per_s for speed in self.rounds]

    def speed_ups(self, plain: "Measurement") -> list[float]:
        """Each round's ratio to the same round of K = 0; empty where nothing was timed."""
        pairs = zip(self.tokens_per_s, plain.tokens_per_s, strict=True)
        return [drafted / undrafted for drafted, undrafted in pairs if undrafted]

    def decode_round(
        self, llm: LLM, prompts: Sequence[EncodedPrompt], params: Sequence[SamplingParams]
    ) -> None:
        """Decode all prompts once, `batch_size` at a time."""
        speed, self.token_ids = DecodeSpeed(), []
        for start in range(0, len(prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            decode = DecodeRun(llm.llm_engine)
            outputs = decode.run(prompts[part], params[part])
            self.token_ids += [output.outputs[0].token_ids for output in outputs]
            self.metrics.merge(decode.metrics)
            speed.num_tokens += decode.speed.num_tokens
            speed.seconds += decode.speed.seconds
        self.rounds.append(speed)

    def to_dict(self, plain: "Measurement") -> dict[str, Any]:
        """What goes into the JSON."""
        speeds, ratios = self.tokens_per_s, self.speed_ups(plain)
        return {
            "k": self.k,
            "batch_size": self.batch_size,
            "tokens_per_s": {"median": median(speeds), "min": min(speeds), "max": max(speeds)},
            "speed_up": median(ratios) if ratios else None,
            "same_texts_as_k0": _num_equal(self.token_ids, plain.token_ids),
            "acceptance_rate_per_pos": self.metrics.acceptance_rate_per_pos,
            **self.metrics.to_dict(),
        }


@app.command()
@takes_engine_options()
def decode(
    *,
    k: Annotated[
        str, typer.Option("-k", metavar="LIST", help="Drafts per step: 3, or 1,2,4, or 1-8.")
    ] = "1-4",
    batch: Annotated[
        str, typer.Option(metavar="LIST", help="Prompts decoded at once: 1, or 1,4,8.")
    ] = "1",
    prompts_file: Annotated[
        Path, typer.Option("--prompts", metavar="FILE", help=PROMPTS_HELP)
    ] = BUNDLED_PROMPTS,
    num_prompts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Prompts, spread over the file.")
    ] = 8,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens per prompt.")] = 96,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 is greedy.")] = 0.0,
    rule: Annotated[
        str | None, typer.Option(metavar="standard|block|coupled", help="At temperature > 0.")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds.")] = 3,
    engine_options: Options,
) -> int:
    """Measure decoding with K drafts a step against K = 0, in one process.

    The last line of the output is JSON, with where the numbers come from.
    """
    numbers, batch_sizes = [0, *parse_k_list(k)], parse_sizes("--batch", batch, "1 or 1,4,8")
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            seed=index,
            rejection_sample_method=rule,  # type: ignore[arg-type] # SamplingParams checks it
        )
        for index in range(num_prompts)
    ]
    inputs = spread_evenly(read_prompts_file(prompts_file), num_prompts)
    speculative = speculative_options(max(numbers), engine_options.pop("speculative_config", None))
    defaults = {"max_num_seqs": max(batch_sizes), "speculative_config": speculative}
    first = LLM(**{**_RUNS_EVERYTHING, **defaults, **engine_options})
    llms = {number: first.with_num_speculative_tokens(number) for number in numbers}
    prompts = first.encode_prompts(inputs)
    config = first.llm_engine.config
    results = []
    for batch_size in batch_sizes:
        measured = _measure(llms, prompts, params[: len(prompts)], batch_size, repeats)
        _show(measured, f"{config.dtype}, {config.device}, temperature {temperature:g}")
        results += [one.to_dict(measured[0]) for one in measured]
    report = {
        "benchmark": "decode",
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "rule": rule or config.rejection_sample_method,
        "repeats": repeats,
        "results": results,
        "provenance": provenance(str(config.device), config.dtype),
    }
    sys.stdout.write(f"{json.dumps(report)}\n")
    return 0


def _measure(
    llms: dict[int, LLM],
    prompts: Sequence[EncodedPrompt],
    params: Sequence[SamplingParams],
    batch_size: int,
    repeats: int,
) -> list[Measurement]:
    """Every K at one batch size, K = 0 first in the list."""
    warm_up = [SamplingParams(temperature=0.0, max_tokens=NUM_WARM_UP_TOKENS)]
    for llm in llms.values():
        DecodeRun(llm.llm_engine).run(prompts[:1], warm_up)
    measured = [Measurement(k, batch_size) for k in llms]
    for number in range(repeats):
        turn = number % len(measured)
        for one in measured[turn:] + measured[:turn]:
            one.decode_round(llms[one.k], prompts, params)
            sys.stderr.write(
                f"batch {batch_size}, round {number + 1} of {repeats}, K = {one.k}: "
                f"{one.tokens_per_s[-1]:.1f} tokens/s\n"
            )
    return measured


def _num_equal(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))


def _show(measured: list[Measurement], setting: str) -> None:
    plain = measured[0]
    table = Table(title=f"batch size {plain.batch_size}, {setting}")
    for heading in (
        "K",
        "tokens/s",
        "range",
        "speed-up",
        "acceptance length (bound)",
        "acceptance rate",
        "by position",
        "same texts as K = 0",
    ):
        table.add_column(heading, justify="right", no_wrap=heading in ("range", "by position"))
    for one in measured:
        speeds, ratios, metrics = one.tokens_per_s, one.speed_ups(plain), one.metrics
        table.add_row(
            str(one.k),
            f"{median(speeds):.1f}",
            f"{min(speeds):.1f}-{max(speeds):.1f}",
            f"{median(ratios):.2f}" if ratios else "",
            f"{metrics.mean_acceptance_length:.2f}" if metrics.num_drafts else "",
            f"{metrics.acceptance_rate:.1%}" if metrics.num_drafts else "",
            " ".join(f"{rate:.2f}" for rate in metrics.acceptance_rate_per_pos),
            f"{_num_equal(one.token_ids, plain.token_ids)}/{len(plain.token_ids)}",
        )
    report_console().print(table)


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.decode"))
