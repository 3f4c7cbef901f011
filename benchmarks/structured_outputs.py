"""Acceptance of drafts under a JSON schema: drawn with the grammar's mask, and without it.

Prompts of the held-out JSON suite are continued by JSON of a schema. Both ways verify with the
mask, so that every finished output is valid and of the same law; what differs is how many drafts
are kept. Without a mask the head drafts what the grammar refuses, and such drafts are rejections.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import jsonschema
import typer
from rich.table import Table

from benchmarks.provenance import provenance
from outrider.bundled import BUNDLED_SUITES
from outrider.config import DraftSampleMethod, RejectionSampleMethod
from outrider.entrypoints.cli.prompt_sources import read_prompts_file
from outrider.entrypoints.cli.report import report_console
from outrider.entrypoints.cli.run import make_app, run
from outrider.entrypoints.decode_run import DecodeRun
from outrider.entrypoints.llm import LLM
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.request import Request
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.draft_sampler import DraftSampler, DraftSampling
from outrider.spec_decode.metrics import SpecDecodeMetrics
from outrider.spec_decode.mtp_proposer import MTPProposer
from outrider.structured_outputs import StructuredOutputsParams
from outrider.training.prompts import spread_evenly

RULES: list[tuple[float, RejectionSampleMethod]] = [
    (0.0, "block"),
    (1.0, "standard"),
    (1.0, "block"),
    (1.0, "coupled"),
]
_NAME: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 24}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": _NAME,
        "version": {"type": "string", "pattern": "^[0-9]{1,2}\\.[0-9]{1,2}$"},
        "private": {"type": "boolean"},
        "kind": {"enum": ["library", "program", "data"]},
        "files": {"type": "array", "items": _NAME, "minItems": 1, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99999},
    },
    "required": ["name", "version", "private", "kind", "files", "size"],
}

app = make_app("benchmarks.structured_outputs")


class UnmaskedDraftSampler(DraftSampler):
    """Draws as if there were no grammar."""

    def start(
        self, requests: Sequence[Request], new_token_ids: Sequence[Sequence[int]]
    ) -> DraftSampling:
        """The requests without their grammars."""
        return super().start([replace(one, grammar=None) for one in requests], new_token_ids)


@dataclass
class Measurement:
    """One rule at one temperature, with or without the mask in drafting.

    Attributes:
        temperature: of the requests.
        rule: of the requests.
        is_masked: the drafts are.
        metrics: what drafting brought.
        num_finished: outputs that came to their end.
        num_valid: of these, those that the schema takes.
    """

    temperature: float
    rule: RejectionSampleMethod
    is_masked: bool
    metrics: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    num_finished: int = 0
    num_valid: int = 0

    def to_dict(self) -> dict[str, Any]:
        """What goes into the JSON."""
        return {
            "temperature": self.temperature,
            "rule": self.rule,
            "is_masked": self.is_masked,
            "num_finished": self.num_finished,
            "num_valid": self.num_valid,
            "acceptance_rate_per_pos": self.metrics.acceptance_rate_per_pos,
            **self.metrics.to_dict(),
        }


@app.command()
def structured_outputs(
    *,
    k: Annotated[int, typer.Option("-k", min=1, help="Drafts per step.")] = 3,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="At most.")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of an output.")] = 160,
    model: Annotated[str | None, typer.Option("--model", help="A checkpoint.")] = None,
) -> None:
    """Compare drafting with and without the mask of a grammar."""
    llm = LLM(model, speculative_config={"method": "mtp", "num_speculative_tokens": k})
    prompts = llm.encode_prompts(
        spread_evenly(read_prompts_file(BUNDLED_SUITES["json"]), num_prompts)
    )
    results = []
    for temperature, rule in RULES:
        params = SamplingParams(
            temperature=temperature,
            seed=1,
            max_tokens=max_tokens,
            rejection_sample_method=rule,
            structured_outputs=StructuredOutputsParams(json=SCHEMA),
        )
        for is_masked in (True, False):
            measured = Measurement(temperature, rule, is_masked)
            _measure(llm, prompts, params, measured)
            results.append(measured)
    report_console().print(_table(results))
    engine = llm.llm_engine.config
    report = {
        "k": k,
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "results": [one.to_dict() for one in results],
        "provenance": provenance(engine.device, engine.dtype),
    }
    print(json.dumps(report))


def _measure(
    llm: LLM, prompts: Sequence[EncodedPrompt], params: SamplingParams, measured: Measurement
) -> None:
    """Decodes all prompts and counts."""
    proposer = llm.llm_engine.proposer
    assert isinstance(proposer, MTPProposer), "the head drafts"
    method: DraftSampleMethod = "probabilistic"
    kind = DraftSampler if measured.is_masked else UnmaskedDraftSampler
    proposer._sampler = kind(llm.llm_engine.sampling_defaults, method)
    decode = DecodeRun(llm.llm_engine)
    for output in decode.run(prompts, [params] * len(prompts)):
        choice = output.outputs[0]
        if choice.finish_reason == "stop":
            measured.num_finished += 1
            measured.num_valid += _is_valid(choice.text)
    measured.metrics.merge(decode.metrics)


def _is_valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _table(results: Sequence[Measurement]) -> Table:
    table = Table()
    for name in ("temperature", "rule", "drafts", "acceptance length", "rate", "by position"):
        table.add_column(name)
    table.add_column("valid of finished")
    for one in results:
        table.add_row(
            f"{one.temperature:g}",
            one.rule,
            "masked" if one.is_masked else "unmasked",
            f"{one.metrics.mean_acceptance_length:.2f}",
            f"{one.metrics.acceptance_rate:.3f}",
            " ".join(f"{rate:.2f}" for rate in one.metrics.acceptance_rate_per_pos),
            f"{one.num_valid} of {one.num_finished}",
        )
    return table


if __name__ == "__main__":
    sys.exit(run(app, "python -m benchmarks.structured_outputs"))
