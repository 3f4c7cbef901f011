"""vLLM with the plugin beside our own engine: start-up, memory of a request, tokens per second.

All run the bundled checkpoint in float32 and decode the same held-out prompts greedily to the same
length, past ends of text. A round is all of them, prompts included; the table has the median of the
rounds after a first one that is not counted. Start-up is the construction of the engine, without
the imports. Memory is what one request of the longest length takes in the caches of a worker, and
what of it is recurrent states: vLLM keeps 1 + K of each where our engine keeps one.
Every worker has one thread, as has our engine: each of two workers is bound to one core.

Where a machine has as many cores as a layout has workers or fewer, several workers show that the
parts fit together, not how fast they are.

    OMP_NUM_THREADS=1 python -m benchmarks.vllm_speed --batch 1,8
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.options import parse_sizes
from benchmarks.provenance import provenance
from benchmarks.vllm_process import num_workers, run_vllm
from benchmarks.vllm_settings import MAX_MODEL_LEN, drafting, engine_options
from outrider.bundled import BUNDLED_PROMPTS
from outrider.entrypoints.cli.options import parse_k_list
from outrider.entrypoints.cli.prompt_sources import read_prompts_file
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.entrypoints.decode_run import DecodeRun
from outrider.entrypoints.llm import LLM
from outrider.errors import ConfigError
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.metrics import SpecDecodeMetrics
from outrider.training.prompts import spread_evenly

LAYOUTS: dict[str, dict[str, Any]] = {
    "vLLM, TP1": {},
    "vLLM, TP2": {"tensor_parallel_size": 2},
}
_KIB = 1024

app = make_app("benchmarks.vllm_speed")


@dataclass(frozen=True)
class Task:
    """What every engine decodes.

    Attributes:
        prompts: token ids of each.
        max_tokens: of an output.
        num_rounds: that are counted.
        batch_size: requests that run at once.
    """

    prompts: list[list[int]]
    max_tokens: int
    num_rounds: int
    batch_size: int

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options that both engines have under the same names."""
        return engine_options(self.batch_size)


@dataclass(frozen=True)
class Speed:
    """One engine at one K and batch size.

    Attributes:
        engine: its name in the table.
        num_workers: processes with a part of the model.
        k: drafts per step.
        batch_size: requests that run at once.
        seconds_to_start: of the engine.
        state_bytes: recurrent states of a request, in a worker.
        request_bytes: a request of the longest length, in a worker.
        tokens_per_s: of each round.
        mean_acceptance_length: 1 + accepted / drafts; 1 without drafts.
    """

    engine: str
    num_workers: int
    k: int
    batch_size: int
    seconds_to_start: float
    state_bytes: int
    request_bytes: int
    tokens_per_s: list[float]
    mean_acceptance_length: float


def measure_vllm(name: str, layout: dict[str, Any], task: Task, k: int) -> Speed:
    """In a process of its own."""
    options = {**task.engine_options, **layout, **drafting(k)}
    one = {"temperature": 0.0, "max_tokens": task.max_tokens, "ignore_eos": True}
    rounds = [one] * (task.num_rounds + 1)
    outcome = run_vllm({"prompts": task.prompts, "engine": options, "rounds": rounds})
    counted = outcome["rounds"][1:]
    drafts, accepted = (
        sum(one[key] for one in counted) for key in ("num_drafts", "num_accepted_tokens")
    )
    return Speed(
        name,
        num_workers(layout),
        k,
        task.batch_size,
        outcome["seconds_to_start"],
        outcome["request_bytes"]["states"],
        outcome["request_bytes"]["all"],
        [sum(map(len, one["token_ids"])) / one["seconds"] for one in counted],
        1 + accepted / drafts if drafts else 1.0,
    )


def measure_own(task: Task, k: int) -> Speed:
    """In this process."""
    started = time.perf_counter()
    speculative = {"method": "mtp", "num_speculative_tokens": k} if k else None
    llm = LLM(**task.engine_options, speculative_config=speculative)
    start_up = time.perf_counter() - started
    params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True)
    prompts = llm.encode_prompts(task.prompts)
    speeds, metrics = [], SpecDecodeMetrics()
    for number in range(task.num_rounds + 1):
        decode = DecodeRun(llm.llm_engine)
        started = time.perf_counter()
        outputs = decode.run(prompts, [params] * len(prompts))
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if number:
            speeds.append(num_tokens / (time.perf_counter() - started))
            metrics.merge(decode.metrics)
    plan = llm.llm_engine.cache_plan
    return Speed(
        "outrider",
        1,
        k,
        task.batch_size,
        start_up,
        plan.state_bytes_per_request,
        plan.bytes_per_full_request,
        speeds,
        metrics.mean_acceptance_length if metrics.num_drafts else 1.0,
    )


def show(found: Sequence[Speed]) -> None:
    """Prints the table."""
    table = Table(title=f"float32, one thread a worker, requests of up to {MAX_MODEL_LEN} tokens")
    for heading in (
        "engine", "at once", "K", "start", "states of a request", "all of it", "tokens/s", "range",
        "acceptance",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for one in found:
        table.add_row(
            one.engine,
            str(one.batch_size),
            str(one.k),
            f"{one.seconds_to_start:.1f} s",
            f"{one.state_bytes / _KIB:.0f} KiB",
            f"{one.request_bytes / _KIB:.0f} KiB",
            f"{median(one.tokens_per_s):.0f}",
            f"{min(one.tokens_per_s):.0f}-{max(one.tokens_per_s):.0f}",
            f"{one.mean_acceptance_length:.2f}",
        )
    report_console().print(table)


@app.command()
def main(
    k: Annotated[str, typer.Option("-k", metavar="LIST", help="Drafts per step.")] = "3",
    batch: Annotated[str, typer.Option(metavar="LIST", help="Requests at once.")] = "1,8",
    num_prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Held-out prompts.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of an output.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds.")] = 3,
) -> int:
    """Measure vLLM with the plugin, with one worker and with two, beside our own engine."""
    num_threads = torch.get_num_threads()
    if num_threads != 1:
        raise ConfigError(
            f"vLLM's workers have one thread each and this process {num_threads}: "
            "set OMP_NUM_THREADS=1"
        )
    batch_sizes, numbers = parse_sizes("--batch", batch, "1 or 1,8"), [0, *parse_k_list(k)]
    prompts = [
        encoded.token_ids
        for encoded in LLM(max_model_len=MAX_MODEL_LEN).encode_prompts(
            spread_evenly(read_prompts_file(BUNDLED_PROMPTS), num_prompts)
        )
    ]
    found = []
    for batch_size in batch_sizes:
        task = Task(prompts, max_tokens, repeats, batch_size)
        for number in numbers:
            found.append(measure_own(task, number))
            found += [measure_vllm(name, one, task, number) for name, one in LAYOUTS.items()]
    found.sort(key=lambda one: (one.batch_size, one.num_workers, one.engine, one.k))
    show(found)
    report = {
        "benchmark": "vllm_speed",
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "results": [asdict(one) for one in found],
        "provenance": provenance("cpu", "float32"),
    }
    typer.echo(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.vllm_speed"))
