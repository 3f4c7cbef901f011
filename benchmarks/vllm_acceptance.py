"""Mean acceptance length of vLLM with the plugin beside our own engine's, at the same settings.

Both decode the same held-out prompts in float32 with drafts that are drawn, at temperature 0 and,
by each rule, at temperature 1. There the texts differ, since each engine draws its own numbers.

With --json-schema the outputs are counted that came to their end, and of them those that are JSON
of the schema: all should be, and each engine should end some. Our engine then draws drafts by the
grammar and vLLM does not, so their acceptance is not the same.

    python -m benchmarks.vllm_acceptance
    python -m benchmarks.vllm_acceptance --json-schema --suite json --max-tokens 160
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import jsonschema
import typer
from rich.table import Table

from benchmarks.provenance import provenance
from benchmarks.vllm_judge import SCHEMA
from benchmarks.vllm_process import run_vllm
from benchmarks.vllm_settings import MAX_MODEL_LEN, drafting, engine_options, prompts_of
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.entrypoints.decode_run import DecodeRun
from outrider.entrypoints.llm import LLM
from outrider.sampling_params import SamplingParams
from outrider.structured_outputs import StructuredOutputsParams
from outrider.tokenizer import Tokenizer

# Temperatures that each rule is measured at; at 0 the rules are one.
WAYS = (("standard", (0.0, 1.0)), ("block", (1.0,)))
TOLERANCE = 0.1

app = make_app("benchmarks.vllm_acceptance")


@dataclass(frozen=True)
class Acceptance:
    """One engine at one rule and temperature.

    Attributes:
        engine: "vllm" or "outrider".
        rule: of verification.
        temperature: of the requests.
        num_drafts: windows with drafts.
        num_draft_tokens: drafts in them.
        num_accepted_tokens: drafts that were kept.
        num_texts: outputs.
        num_finished: of these, those that came to their end.
        num_valid: of these, those that the schema takes; None without one.
    """

    engine: str
    rule: str
    temperature: float
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_texts: int
    num_finished: int
    num_valid: int | None

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def to_dict(self) -> dict[str, Any]:
        """What goes into the JSON."""
        return {**asdict(self), "mean_acceptance_length": self.mean_acceptance_length}


@dataclass(frozen=True)
class Setting:
    """What both engines decode.

    Attributes:
        prompts: token ids of each.
        k: drafts per step.
        max_tokens: of an output.
        schema: that the outputs are held to, or None.
        tokenizer: of the checkpoint.
        eos_token_ids: ids that end an output.
    """

    prompts: list[list[int]]
    k: int
    max_tokens: int
    schema: dict[str, Any] | None
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]

    def outputs(self, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """How many of them are what they should be, by the names of `Acceptance`."""
        finished = [text for text in texts if text and text[-1] in self.eos_token_ids]
        decoded = [self.tokenizer.decode(list(text[:-1])) for text in finished]
        valid = None if self.schema is None else sum(is_valid(one, self.schema) for one in decoded)
        return {"num_texts": len(texts), "num_finished": len(finished), "num_valid": valid}


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON of a schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def measure_vllm(setting: Setting, layout: dict[str, Any]) -> list[Acceptance]:
    """Each rule in an engine of vLLM of its own."""
    found = []
    for rule, temperatures in WAYS:
        rounds = [
            {"temperature": one, "max_tokens": setting.max_tokens, "schema": setting.schema}
            for one in temperatures
        ]
        how = {"rejection_sample_method": rule, "draft_sample_method": "probabilistic"}
        engine = engine_options(**drafting(setting.k, **how), **layout)
        outcome = run_vllm({"prompts": setting.prompts, "engine": engine, "rounds": rounds})
        for temperature, one in zip(temperatures, outcome["rounds"], strict=True):
            counts = {
                name: one[name]
                for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            }
            outputs = setting.outputs(one["token_ids"])
            found.append(Acceptance("vllm", rule, temperature, **counts, **outputs))
    return found


def measure_own(llm: LLM, setting: Setting) -> list[Acceptance]:
    """Each rule in our own engine."""
    schema = setting.schema
    found = []
    for rule, temperatures in WAYS:
        for temperature in temperatures:
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=setting.max_tokens,
                    seed=number,
                    rejection_sample_method=rule,
                    structured_outputs=None if schema is None else StructuredOutputsParams(schema),
                )
                for number in range(len(setting.prompts))
            ]
            decode = DecodeRun(llm.llm_engine)
            outputs = decode.run(llm.encode_prompts(setting.prompts), params)
            texts = [output.outputs[0].token_ids for output in outputs]
            metrics = decode.metrics
            found.append(
                Acceptance(
                    "outrider",
                    rule,
                    temperature,
                    metrics.num_drafts,
                    metrics.num_draft_tokens,
                    metrics.num_accepted_tokens,
                    **setting.outputs(texts),
                )
            )
    return found


def show(theirs: Sequence[Acceptance], ours: Sequence[Acceptance]) -> None:
    """Prints the table."""
    table = Table(title="mean acceptance length")
    for heading in ("temperature", "rule", "vLLM", "our engine", "difference", "ended", "valid"):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for one, other in zip(theirs, ours, strict=True):
        lengths = (one.mean_acceptance_length, other.mean_acceptance_length)
        table.add_row(
            f"{one.temperature:g}",
            "any" if one.temperature == 0 else one.rule,
            *(f"{length:.2f}" for length in lengths),
            f"{lengths[0] - lengths[1]:+.2f}",
            f"{one.num_finished}, {other.num_finished} of {one.num_texts}",
            "" if one.num_valid is None else f"{one.num_valid}, {other.num_valid}",
        )
    report_console().print(table)


@app.command()
def main(
    k: Annotated[int, typer.Option("-k", min=1, help="Drafts per step.")] = 3,
    suite: Annotated[str, typer.Option(metavar="LIST", help="Bundled sets of prompts.")] = "code",
    num_prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Of each suite.")] = 48,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Of an output.")] = 128,
    engine: Annotated[str, typer.Option(metavar="JSON", help="More options of vLLM's LLM.")] = "{}",
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Hold the outputs to a schema.")
    ] = False,
) -> int:
    """Compare the acceptance of drafts on vLLM with our own engine's."""
    llm = LLM(
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": k},
    )
    setting = Setting(
        prompts_of(llm, suite.split(","), num_prompts),
        k,
        max_tokens,
        SCHEMA if json_schema else None,
        llm.get_tokenizer(),
        llm.llm_engine.eos_token_ids,
    )
    ours = measure_own(llm, setting)
    theirs = measure_vllm(setting, json.loads(engine))
    show(theirs, ours)
    differences = [
        one.mean_acceptance_length - other.mean_acceptance_length
        for one, other in zip(theirs, ours, strict=True)
    ]
    found = (*theirs, *ours)
    if json_schema:
        is_met = all(0 < one.num_finished == one.num_valid for one in found)
    else:
        is_met = max(map(abs, differences)) <= TOLERANCE
    report = {
        "benchmark": "vllm_acceptance",
        "k": k,
        "suites": suite.split(","),
        "num_prompts": len(setting.prompts),
        "max_tokens": max_tokens,
        "engine": json.loads(engine),
        "has_schema": json_schema,
        "results": [one.to_dict() for one in found],
        "differences": differences,
        "is_met": is_met,
        "provenance": provenance("cpu", "float32"),
    }
    typer.echo(json.dumps(report))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.vllm_acceptance"))
