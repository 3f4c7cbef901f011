"""Time to the first token with a prefix cache and without.

Two engines over the same weights, one without a prefix cache. A turn of a chat is a prompt; the
next turn is that prompt, what was answered, and some tokens more. Each round takes, at every
length, in an order that turns from round to round:

    off       the turn, by the engine that keeps nothing
    cold      the turn, by the other one with its cache emptied: what keeping states costs
    warm      the next turn, by that engine right after its answer
    off next  the next turn, by the engine that keeps nothing

The table has the median over the rounds and their range. The speed-up is the median of each round's
ratio of "off next" to "warm".
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.options import parse_sizes
from benchmarks.provenance import provenance
from outrider.bundled import BUNDLED_PROMPTS
from outrider.engine.engine import LLMEngine
from outrider.entrypoints.cli.options import Options, speculative_options, takes_engine_options
from outrider.entrypoints.cli.prompt_sources import PROMPTS_HELP, read_prompts_file
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.entrypoints.llm import LLM
from outrider.errors import ConfigError
from outrider.sampling_params import SamplingParams

NUM_ANSWER_TOKENS = 32
NUM_NEW_TOKENS = 24
# Of the table in a file or a pipe.
REPORT_WIDTH = 130
_KINDS = ("off", "cold", "warm", "off next")

app = make_app("benchmarks.prefix")


@dataclass
class Measurement:
    """One length of prompts.

    Attributes:
        num_tokens: of the first turn.
        seconds: to the first token, by kind, one a round.
        num_cached_tokens: of the next turn, in the last round.
        num_next_tokens: of the next turn.
        num_different: rounds in which the two engines said different things.
    """

    num_tokens: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in _KINDS})
    num_cached_tokens: int = 0
    num_next_tokens: int = 0
    num_different: int = 0

    def round(self, on: LLMEngine, off: LLMEngine, tokens: Sequence[int], is_turned: bool) -> None:
        """One round over this length; `tokens` has enough for both turns."""
        turn = list(tokens[: self.num_tokens])
        said: dict[str, list[int]] = {}
        on.reset_prefix_cache()
        for kind, engine in (("cold", on), ("off", off))[:: -1 if is_turned else 1]:
            seconds, said[kind], _ = _run(engine, turn)
            self.seconds[kind].append(seconds)
        following = [*turn, *said["off"], *tokens[self.num_tokens :][:NUM_NEW_TOKENS]]
        for kind, engine in (("warm", on), ("off next", off))[:: -1 if is_turned else 1]:
            seconds, said[kind], num_cached = _run(engine, following)
            self.seconds[kind].append(seconds)
            if kind == "warm":
                self.num_cached_tokens, self.num_next_tokens = num_cached or 0, len(following)
        is_same = said["cold"] == said["off"] and said["warm"] == said["off next"]
        self.num_different += not is_same

    def speed_up(self) -> float:
        """Median of the rounds' ratios."""
        pairs = zip(self.seconds["off next"], self.seconds["warm"], strict=True)
        return median(off / warm for off, warm in pairs)

    def to_dict(self) -> dict[str, Any]:
        """For the line of JSON; milliseconds."""
        figures = {
            f"{kind.replace(' ', '_')}_ms": {
                "median": 1e3 * median(values),
                "min": 1e3 * min(values),
                "max": 1e3 * max(values),
            }
            for kind, values in self.seconds.items()
        }
        return {
            "num_prompt_tokens": self.num_tokens,
            "num_next_prompt_tokens": self.num_next_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "speed_up": self.speed_up(),
            "num_different_rounds": self.num_different,
            **figures,
        }


@app.command()
@takes_engine_options()
def prefix(
    *,
    k: Annotated[int, typer.Option("-k", metavar="K", help="Drafts per step.")] = 3,
    lengths: Annotated[
        str, typer.Option(metavar="LIST", help="Tokens of the first turn: 256, or 256,1024.")
    ] = "256,512,1024,2048",
    prompts_file: Annotated[
        Path, typer.Option("--prompts", metavar="FILE", help=PROMPTS_HELP)
    ] = BUNDLED_PROMPTS,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds.")] = 5,
    engine_options: Options,
) -> int:
    """Measure the time to the first token with a prefix cache and without, in one process.

    The last line of the output is JSON, with where the numbers come from.
    """
    numbers = parse_sizes("--lengths", lengths, "256,1024")
    speculative = speculative_options(k, engine_options.pop("speculative_config", None))
    llm = LLM(speculative_config=speculative, **{"max_num_seqs": 1, **engine_options})
    on = llm.llm_engine
    if on.cache_manager.prefix is None:
        raise ConfigError("nothing to measure: the engine has no prefix cache")
    off = LLMEngine(
        replace(on.config, enable_prefix_caching=False, prefix_cache_memory=None), on.model
    )
    prompts = llm.encode_prompts(read_prompts_file(prompts_file))
    tokens = [token_id for prompt in prompts for token_id in prompt.token_ids]
    tokens *= -(-(max(numbers) + NUM_NEW_TOKENS) // len(tokens))
    measured = [Measurement(number) for number in numbers]
    for engine in (on, off):
        _run(engine, tokens[: numbers[0]])
    for number in range(repeats):
        for one in measured:
            one.round(on, off, tokens, bool(number % 2))
            sys.stderr.write(f"round {number + 1} of {repeats}, {one.num_tokens} tokens\n")
    _show(measured, f"K = {k}, blocks of {on.config.block_size}, {on.config.dtype}")
    report = {
        "benchmark": "prefix",
        "k": k,
        "repeats": repeats,
        "num_answer_tokens": NUM_ANSWER_TOKENS,
        "results": [one.to_dict() for one in measured],
        "provenance": provenance(str(on.config.device), on.config.dtype),
    }
    sys.stdout.write(f"{json.dumps(report)}\n")
    return 0


def _run(engine: LLMEngine, prompt: list[int]) -> tuple[float, list[int], int | None]:
    """Decodes a prompt; seconds to its first token, what it says, and its cached tokens."""
    params = SamplingParams(temperature=0, max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)
    said: list[int] = []
    num_cached, seconds = None, 0.0
    start = time.perf_counter()
    engine.add_request("turn", prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            seconds = seconds or time.perf_counter() - start
            said += output.new_token_ids
            num_cached = output.num_cached_tokens
    return seconds, said, num_cached


def _show(measured: list[Measurement], setting: str) -> None:
    table = Table(title=f"milliseconds to the first token, {setting}")
    for heading in ("tokens", "off", "cold", "next turn", "cached", "off", "warm", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in measured:
        cells = {
            kind: f"{1e3 * median(v):.0f} ({1e3 * min(v):.0f}-{1e3 * max(v):.0f})"
            for kind, v in one.seconds.items()
        }
        table.add_row(
            str(one.num_tokens),
            cells["off"],
            cells["cold"],
            str(one.num_next_tokens),
            str(one.num_cached_tokens),
            cells["off next"],
            cells["warm"],
            f"{one.speed_up():.1f}",
        )
    report_console(REPORT_WIDTH).print(table)


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.prefix"))
