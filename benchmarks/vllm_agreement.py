"""What the plugin makes vLLM write, judged by our own float32 engine.

Each K has a vLLM engine of its own, in a process of its own. Its greedy texts are then read by our
engine, which says at each of their tokens what it would have written after the same tokens before
it (teacher forcing): the agreement, and how far below its own choice the token lies. Beside K = 0
stands what drafting adds to, or takes from, that.

    python -m benchmarks.vllm_agreement -k 3 --dtype float32 --prefix-caching
    python -m benchmarks.vllm_agreement -k 3 --engine '{"tensor_parallel_size": 2}'
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import provenance
from outrider.bundled import BUNDLED_MODEL_DIR, BUNDLED_SUITES
from outrider.entrypoints.cli.options import parse_k_list
from outrider.entrypoints.cli.prompt_sources import PromptInput, read_prompts_file, spread
from outrider.entrypoints.cli.run import make_app, run
from outrider.entrypoints.llm import LLM
from outrider.errors import ConfigError
from outrider.sampling_params import SamplingParams

# What an object of the JSON suite may hold; short, so that drafts are often cut by the grammar.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
MAX_MODEL_LEN = 1024
TIMEOUT_S = 1800

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
        num_same_texts: texts that are token for token those of K = 0.
        num_texts: texts.
        mean_acceptance_length: 1 + accepted / drafts; 1 without drafts.
        num_cached_tokens: of prompts, taken from the prefix cache.
        seconds_to_start: of vLLM's engine.
        tokens_per_s: all texts together, prompts included.
    """

    k: int
    num_tokens: int
    num_agreeing: int
    mean_gap: float
    largest_gap: float
    num_same_texts: int
    num_texts: int
    mean_acceptance_length: float
    num_cached_tokens: int
    seconds_to_start: float
    tokens_per_s: float


def _text(prompt: PromptInput) -> str:
    """Of a line of a suite, which are texts."""
    return prompt["prompt"] if isinstance(prompt, dict) else prompt


def chosen_prompts(judge: LLM, suites: Sequence[str], num_prompts: int) -> list[list[int]]:
    """Token ids of prompts of each suite, and one of all of them that is many blocks long."""
    found: list[list[int]] = []
    for suite in suites:
        if suite not in BUNDLED_SUITES:
            raise ConfigError(f"--suite: {suite} is none of {', '.join(BUNDLED_SUITES)}")
        for prompt in spread(read_prompts_file(BUNDLED_SUITES[suite]), num_prompts):
            found.append(judge.get_tokenizer().encode(_text(prompt)))
    together = [token for prompt in found for token in prompt]
    return [*found, together[: MAX_MODEL_LEN // 2]]


def run_vllm(task: dict[str, Any]) -> dict[str, Any]:
    """Decodes a task in a vLLM of its own; its log is shown if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        asked, found, log = (Path(folder) / name for name in ("task.json", "found.json", "log"))
        asked.write_text(json.dumps(task))
        with log.open("w") as stream:
            status = subprocess.run(
                [sys.executable, "-m", "benchmarks.vllm_run", str(asked), str(found)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                env={
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    **os.environ,
                },
                check=False,
            ).returncode
        if status:
            sys.stderr.write(log.read_text()[-6000:])
            raise ConfigError(f"vLLM ended with status {status}, see its log above")
        outcome: dict[str, Any] = json.loads(found.read_text())
        return outcome


def judge_texts(
    judge: LLM, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> list[float]:
    """How far each token of the texts lies below what our engine would have written, in nats."""
    scored = judge.generate(
        [prompt + text for prompt, text in zip(prompts, texts, strict=True)],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1),
    )
    gaps = []
    for prompt, text, output in zip(prompts, texts, scored, strict=True):
        assert output.prompt_logprobs is not None, "they were asked for"
        for token, entry in zip(text, output.prompt_logprobs[len(prompt) :], strict=True):
            assert entry is not None, "only the first token of a prompt has none"
            best = max(found.logprob for found in entry.values())
            gaps.append(best - entry[token].logprob)
    return gaps


def measure(
    judge: LLM,
    prompts: list[list[int]],
    ks: Sequence[int],
    engine: dict[str, Any],
    max_tokens: int,
    schema: dict[str, Any] | None,
) -> list[Agreement]:
    """Decodes with each K, the first of them 0, and judges it."""
    found = []
    first: list[list[int]] | None = None
    for k in ks:
        speculative = {"method": "mtp", "num_speculative_tokens": k, "enforce_eager": True}
        task = {
            "prompts": prompts,
            "engine": {**engine, **({"speculative_config": speculative} if k else {})},
            "max_tokens": max_tokens,
            "schema": schema,
            "num_rounds": 2 if engine["enable_prefix_caching"] else 1,
        }
        outcome = run_vllm(task)
        texts = outcome["token_ids"]
        first = texts if first is None else first
        gaps = judge_texts(judge, prompts, texts)
        accepted, drafts = outcome["num_accepted_tokens"], outcome["num_drafts"]
        found.append(
            Agreement(
                k,
                len(gaps),
                sum(gap == 0 for gap in gaps),
                sum(gaps) / len(gaps),
                max(gaps),
                sum(a == b for a, b in zip(texts, first, strict=True)),
                len(texts),
                1 + accepted / drafts if drafts else 1.0,
                int(outcome["num_cached_tokens"]),
                outcome["seconds_to_start"],
                outcome["num_tokens"] / outcome["seconds"],
            )
        )
    return found


def show(found: Sequence[Agreement], title: str) -> None:
    """Prints the table."""
    table = Table(title=title)
    for heading in (
        "K", "tokens", "agree", "mean gap", "largest", "same texts", "acceptance", "cached",
        "start", "tokens/s",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(
            str(row.k),
            str(row.num_tokens),
            f"{row.num_agreeing / row.num_tokens:.2%}",
            f"{row.mean_gap:.1e}",
            f"{row.largest_gap:.1e}",
            f"{row.num_same_texts}/{row.num_texts}",
            f"{row.mean_acceptance_length:.2f}",
            str(row.num_cached_tokens),
            f"{row.seconds_to_start:.0f} s",
            f"{row.tokens_per_s:.0f}",
        )
    Console(width=110).print(table)


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
    options = {
        "model": str(BUNDLED_MODEL_DIR),
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "enable_prefix_caching": prefix_caching,
        "block_size": 64,
        **json.loads(engine),
    }
    judge = LLM(dtype="float32", max_model_len=MAX_MODEL_LEN)
    prompts = chosen_prompts(judge, suite.split(","), num_prompts)
    schema = SCHEMA if json_schema else None
    found = measure(judge, prompts, [0, *parse_k_list(k)], options, max_tokens, schema)
    label = " ".join(
        [dtype, engine, *["prefix caching"] * prefix_caching, *["schema"] * json_schema]
    )
    show(found, label)
    typer.echo(
        json.dumps(
            {
                "layout": options,
                "schema": json_schema,
                "results": [asdict(row) for row in found],
                "provenance": provenance("cpu", dtype),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.vllm_agreement"))
