"""The self-test behind `outrider check`: K > 0 gives token for token what K = 0 gives.

It runs on the user's own checkpoint and machine. At temperature 0 every rule is argmax equality; at
temperature 1 the rule `coupled` is the one that promises the same text for every K. A differing
token is a failure, except for a near-tie in floating point: where some discrete choice at or before
it (the token, an expert, a block of keys) was decided by less than the arithmetic resolves.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TypedDict

from outrider.entrypoints.decode_run import DecodeRun
from outrider.errors import RequestError
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.metrics import SpecDecodeMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.engine.engine import LLMEngine
    from outrider.entrypoints.prompt_encoder import EncodedPrompt

GREEDY, COUPLED = "greedy", "coupled"
RULES = (GREEDY, COUPLED)
# float32 on the CPU: matrix products give a row other last bits when the number of rows changes,
# 1e-7 to 5e-6 of the logits. In float64 no difference is forgiven.
NEAR_TIE_MARGIN = 1e-4
# A share of near-ties above this is no coincidence.
MAX_NEAR_TIES_PER_TOKEN = 1e-4


@dataclass(frozen=True)
class Difference:
    """A place where drafting changed the text.

    Attributes:
        prompt: its index, from 0.
        position: of the first differing token in the output, from 0.
        margin: the least by which a choice at or before it was decided.
        rule: "greedy" at temperature 0, "coupled" at temperature 1.
        k: drafts per step.
    """

    prompt: int
    position: int
    margin: float
    rule: str
    k: int

    def to_dict(self) -> dict[str, object]:
        """As JSON, which knows no infinity."""
        margin = self.margin if math.isfinite(self.margin) else None
        return {**asdict(self), "margin": margin}


class ReportDict(TypedDict):
    """The report under the names that the command line prints as JSON."""

    prompts: int
    k: list[int]
    mismatches: list[dict[str, object]]
    near_ties: list[dict[str, object]]
    mean_acceptance_length: float


@dataclass
class Report:
    """What came out.

    Attributes:
        num_prompts: compared.
        k: numbers of drafts compared with none.
        num_tokens: compared, over all rules and K.
        mismatches: differences that are failures.
        near_ties: differences that are not.
        metrics: what drafting brought, by rule and K.
    """

    num_prompts: int
    k: list[int]
    num_tokens: int = 0
    mismatches: list[Difference] = field(default_factory=list)
    near_ties: list[Difference] = field(default_factory=list)
    metrics: dict[tuple[str, int], SpecDecodeMetrics] = field(default_factory=dict)

    @property
    def has_too_many_near_ties(self) -> bool:
        """Whether there are more near-ties than chance gives; a single one proves nothing."""
        return len(self.near_ties) > max(1, self.num_tokens * MAX_NEAR_TIES_PER_TOKEN)

    @property
    def is_lossless(self) -> bool:
        """Whether the test passed."""
        return not self.mismatches and not self.has_too_many_near_ties

    @property
    def mean_acceptance_length(self) -> float:
        """Over all drafts at temperature 0, those of every K together."""
        total = SpecDecodeMetrics()
        for (rule, _), metrics in self.metrics.items():
            if rule == GREEDY:
                total.merge(metrics)
        return total.mean_acceptance_length

    def to_dict(self) -> ReportDict:
        """What goes into the command line's JSON."""
        return {
            "prompts": self.num_prompts,
            "k": self.k,
            "mismatches": [one.to_dict() for one in self.mismatches],
            "near_ties": [one.to_dict() for one in self.near_ties],
            "mean_acceptance_length": self.mean_acceptance_length,
        }


@dataclass
class SelfTest:
    """Prompts, decoded again and again with other numbers of drafts.

    Attributes:
        engine: drafts with at least max(k) tokens per step.
        prompts: any number.
        k: numbers of drafts to compare with none.
        max_tokens: decoded for each prompt.
        on_run: called with rule and K (0 first) before the prompts are decoded so.
    """

    engine: LLMEngine
    prompts: Sequence[EncodedPrompt]
    k: list[int]
    max_tokens: int
    on_run: Callable[[str, int], object] | None = None

    def run(self) -> Report:
        """Decode with every K under every rule, and compare."""
        report = Report(len(self.prompts), self.k)
        for rule in RULES:
            plain, _ = self._decode(rule, 0)
            for k in self.k:
                drafted, report.metrics[rule, k] = self._decode(rule, k)
                for index, (expected, got) in enumerate(zip(plain, drafted, strict=True)):
                    self._compare(report, index, expected, got, rule, k)
        return report

    def _params(self, rule: str, index: int, k: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.0 if rule == GREEDY else 1.0,
            max_tokens=self.max_tokens,
            seed=index,
            num_speculative_tokens=k,
            rejection_sample_method=None if rule == GREEDY else "coupled",
        )

    def _decode(self, rule: str, k: int) -> tuple[list[list[int]], SpecDecodeMetrics]:
        if self.on_run is not None:
            self.on_run(rule, k)
        run = DecodeRun(self.engine)
        params = [self._params(rule, index, k) for index in range(len(self.prompts))]
        results = run.run(self.prompts, params)
        for prompt, result in zip(self.prompts, results, strict=True):
            # Two outputs that end at once would be equal, and prove nothing.
            if result.outputs[0].finish_reason == "error":
                raise RequestError(f"{prompt.name}: the model's probabilities are not finite")
        return [result.outputs[0].token_ids for result in results], run.metrics

    def _compare(
        self, report: Report, index: int, plain: list[int], drafted: list[int], rule: str, k: int
    ) -> None:
        report.num_tokens += len(plain)
        position = first_difference(plain, drafted)
        if position is None:
            return
        margin = self._least_margin(index, plain[:position], rule)
        is_near_tie = self.engine.config.dtype != "float64" and margin < NEAR_TIE_MARGIN
        listed = report.near_ties if is_near_tie else report.mismatches
        listed.append(Difference(index, position, margin, rule, k))

    def _least_margin(self, index: int, output: list[int], rule: str) -> float:
        """The least margin of the plain decoding up to the choice that follows `output`."""
        prompt = self.prompts[index].token_ids
        margins = self.engine.margins([*prompt, *output], len(prompt), self._params(rule, index, 0))
        return float(margins.min())


def first_difference(expected: list[int], got: list[int]) -> int | None:
    """Position of the first token that differs or that only one of the two has; None if equal."""
    if expected == got:
        return None
    for position, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return position
    return min(len(expected), len(got))
