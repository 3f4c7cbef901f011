"""Throughput and latency of the server under load, with K drafts a step and with none.

Every K has a server of its own, a process that listens on loopback; K = 0 runs without any part of
drafting. A level is a number of streams: that many requests are open at once, each taking the next
prompt as soon as it has ended, through OpenAI's own client. One round puts every K under the same
level in an order that turns from round to round; the server that does not have its turn is idle.

Times are the client's. A chunk may bring several tokens: the gap before it is shared out evenly
among them as the inter-token latency, and stands beside it whole as the gap between chunks, which
is what a reader sees.
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, Self

import openai
import typer
from rich.table import Table

from benchmarks.decode import NUM_WARM_UP_TOKENS
from benchmarks.options import parse_sizes
from benchmarks.provenance import provenance
from outrider.bundled import BUNDLED_MODEL_DIR, BUNDLED_PROMPTS
from outrider.config import EngineConfig
from outrider.entrypoints.cli.options import parse_k_list
from outrider.entrypoints.cli.prompt_sources import PROMPTS_HELP, read_prompts_file
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.errors import ConfigError, OutriderError
from outrider.training.prompts import spread_evenly

START_TIMEOUT_S = 120
_POLL_S = 0.1
_SERVED = re.compile(r"serving (?P<model>\S+) on (?P<url>http\S+)")

app = make_app("benchmarks.serving")


@dataclass
class Stream:
    """One answer as its client saw it.

    Attributes:
        first_token_s: from the request to the first token.
        chunks: seconds since the chunk before, and tokens, of each chunk past the first.
        token_ids: of the text.
    """

    first_token_s: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass
class Level:
    """One K at one number of streams.

    Attributes:
        k: drafts per step.
        num_streams: requests that are open at once.
        tokens_per_s: of each round, all requests together, prompts and waits included.
        streams: of all rounds.
    """

    k: int
    num_streams: int
    tokens_per_s: list[float] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    def add_round(self, streams: list[Stream], seconds: float) -> None:
        """Adds the answers to all requests, which took so long together."""
        self.streams += streams
        self.tokens_per_s.append(sum(len(one.token_ids) for one in streams) / seconds)

    @property
    def first_token_s(self) -> list[float]:
        """Of each request."""
        return [one.first_token_s for one in self.streams]

    @property
    def inter_token_s(self) -> list[float]:
        """Of each token past the first chunk."""
        return [
            gap / num_tokens
            for one in self.streams
            for gap, num_tokens in one.chunks
            for _ in range(num_tokens)
        ]

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Of each chunk past the first."""
        return [gap for one in self.streams for gap, _ in one.chunks]

    def to_dict(self) -> dict[str, Any]:
        """What goes into the JSON; times in seconds."""
        speeds = self.tokens_per_s
        return {
            "k": self.k,
            "num_streams": self.num_streams,
            "num_requests": len(self.streams),
            "tokens_per_s": {"median": median(speeds), "min": min(speeds), "max": max(speeds)},
            "time_to_first_token_s": percentiles(self.first_token_s),
            "inter_token_latency_s": percentiles(self.inter_token_s),
            "chunk_gap_s": percentiles(self.chunk_gaps_s),
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The 50th and the 99th, interpolated; None of fewer than two values."""
    if len(values) < 2:
        return None
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


class ServerProcess:
    """A server in a process of its own, on a free port of loopback.

    Args:
        model_dir: the checkpoint.
        k: drafts per step.
        max_num_seqs: requests that run at once.
    """

    def __init__(self, model_dir: Path, k: int, max_num_seqs: int) -> None:
        # Without -k the server drafts where the checkpoint has a head.
        options = ["--port", "0", "--max-num-seqs", str(max_num_seqs), "-k", str(k)]
        # Every round runs its prompts, whatever the rounds before it have run.
        options.append("--no-enable-prefix-caching")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - stop() closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outrider", "serve", str(model_dir), *options],
            stdout=self._log,
            stderr=self._log,
        )
        self.model, self.url = "", ""

    def wait_until_it_listens(self) -> Self:
        """Returns when requests can be sent.

        Raises:
            OutriderError: the server has ended, with the last thing it said, or takes too long.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            has_ended = self._process.poll() is not None
            self._log.seek(0)
            log = self._log.read()
            if found := _SERVED.search(log):
                self.model, self.url = found["model"], found["url"]
                return self
            if has_ended:
                raise OutriderError(
                    f"the server did not start: {log.strip().rpartition(chr(10))[2]}"
                )
            time.sleep(_POLL_S)
        raise OutriderError(f"the server did not start within {START_TIMEOUT_S} s")

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait()
        self._log.close()


@contextmanager
def served(model_dir: Path, k: int, max_num_seqs: int) -> Iterator[ServerProcess]:
    """A server that listens, for as long as the context lasts."""
    server = ServerProcess(model_dir, k, max_num_seqs)
    try:
        yield server.wait_until_it_listens()
    finally:
        server.stop()


async def answer(
    client: openai.AsyncOpenAI, model: str, prompt: str | list[int], **options: Any
) -> Stream:
    """Asks for one completion, streamed, and times its chunks."""
    stream = Stream()
    mark = time.perf_counter()
    chunks = await client.completions.create(
        model=model,
        prompt=prompt,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        **options,
    )
    async for chunk in chunks:
        token_ids = getattr(chunk.choices[0], "token_ids", None) if chunk.choices else None
        if not token_ids:
            continue
        now = time.perf_counter()
        if stream.token_ids:
            stream.chunks.append((now - mark, len(token_ids)))
        else:
            stream.first_token_s = now - mark
        stream.token_ids += token_ids
        mark = now
    return stream


async def put_under_load(
    server: ServerProcess, prompts: Sequence[str | list[int]], num_streams: int, **options: Any
) -> tuple[list[Stream], float]:
    """Asks for all completions, so many at once; returns the answers and the seconds."""
    waiting = iter(prompts)

    async def ask_on(client: openai.AsyncOpenAI) -> list[Stream]:
        return [await answer(client, server.model, prompt, **options) for prompt in waiting]

    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        start = time.perf_counter()
        answers = await asyncio.gather(*(ask_on(client) for _ in range(num_streams)))
        seconds = time.perf_counter() - start
    return [stream for one in answers for stream in one], seconds


@app.command()
def serving(
    *,
    model_dir: Annotated[
        Path, typer.Option("--model", metavar="DIR", help="The checkpoint.")
    ] = BUNDLED_MODEL_DIR,
    k: Annotated[
        str, typer.Option("-k", metavar="LIST", help="Drafts per step beside 0: 3, or 1,3.")
    ] = "3",
    streams: Annotated[
        str, typer.Option(metavar="LIST", help="Requests open at once: 1, or 1,8,32.")
    ] = "1,8,32",
    num_requests: Annotated[
        int, typer.Option("--requests", metavar="N", min=1, help="Of each round.")
    ] = 32,
    prompts_file: Annotated[
        Path, typer.Option("--prompts", metavar="FILE", help=PROMPTS_HELP)
    ] = BUNDLED_PROMPTS,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens a request.")] = 64,
    temperature: Annotated[float, typer.Option(metavar="T", min=0, help="0 is greedy.")] = 0.0,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Of each level.")] = 3,
) -> int:
    """Measure the server under load with drafts and without.

    The last line of the output is JSON, with where the numbers come from.
    """
    levels = parse_sizes("--streams", streams, "1 or 1,8,32")
    numbers = [0, *parse_k_list(k)]
    prompts = [
        _as_field(one) for one in spread_evenly(read_prompts_file(prompts_file), num_requests)
    ]
    if len(prompts) < max(levels):
        raise ConfigError(f"--requests: {len(prompts)} prompts cannot fill {max(levels)} streams")
    options = {"max_tokens": max_tokens, "temperature": temperature}
    with ExitStack() as stack:
        servers = {
            number: stack.enter_context(served(model_dir, number, max(levels)))
            for number in numbers
        }
        for server in servers.values():
            warm_up = {**options, "max_tokens": NUM_WARM_UP_TOKENS}
            asyncio.run(put_under_load(server, prompts[:1], 1, **warm_up))
        results = [
            level
            for num_streams in levels
            for level in _measure(servers, prompts, num_streams, rounds, options)
        ]
    config = EngineConfig(model=str(model_dir)).resolve()
    _show(results, f"temperature {temperature:g}, {len(prompts)} requests of {max_tokens} tokens")
    report = {
        "benchmark": "serving",
        "max_tokens": max_tokens,
        "temperature": temperature,
        "rounds": rounds,
        "results": [level.to_dict() for level in results],
        "provenance": provenance(str(config.device), config.dtype),
    }
    sys.stdout.write(f"{json.dumps(report)}\n")
    return 0


def _as_field(prompt: str | dict[str, Any]) -> str | list[int]:
    """A prompt of a file as OpenAI's field of that name."""
    if isinstance(prompt, str):
        return prompt
    field_value: str | list[int] = prompt.get("prompt_token_ids") or prompt["prompt"]
    return field_value


def _measure(
    servers: dict[int, ServerProcess],
    prompts: Sequence[str | list[int]],
    num_streams: int,
    rounds: int,
    options: dict[str, Any],
) -> list[Level]:
    """Every K at one number of streams."""
    levels = [Level(k, num_streams) for k in servers]
    for number in range(rounds):
        turn = number % len(levels)
        for level in levels[turn:] + levels[:turn]:
            load = put_under_load(servers[level.k], prompts, num_streams, **options)
            level.add_round(*asyncio.run(load))
            sys.stderr.write(
                f"{num_streams} streams, round {number + 1} of {rounds}, K = {level.k}: "
                f"{level.tokens_per_s[-1]:.1f} tokens/s\n"
            )
    return levels


def _show(results: Sequence[Level], setting: str) -> None:
    table = Table(title=f"the server under load, {setting}")
    for heading in (
        "streams",
        "K",
        "tokens/s",
        "range",
        "first token p50 / p99, ms",
        "inter-token p50 / p99, ms",
        "chunk gap p50 / p99, ms",
    ):
        table.add_column(heading, justify="right")
    for level in results:
        speeds = level.tokens_per_s
        table.add_row(
            str(level.num_streams),
            str(level.k),
            f"{median(speeds):.1f}",
            f"{min(speeds):.1f}-{max(speeds):.1f}",
            *(_ms(values) for values in (level.first_token_s, level.inter_token_s)),
            _ms(level.chunk_gaps_s),
        )
    report_console().print(table)


def _ms(values: Sequence[float]) -> str:
    cuts = percentiles(values)
    return f"{1e3 * cuts['p50']:.0f} / {1e3 * cuts['p99']:.0f}" if cuts else ""


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.serving"))
