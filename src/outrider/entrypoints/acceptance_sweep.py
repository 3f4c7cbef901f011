"""Acceptance over every combination of K, temperature, drafts, rule and suite that is asked for.

Several ways of decoding are one: at temperature 0 every rule is argmax equality and every draft the
likeliest token, and with one-hot drafts `block` is `standard`. What is one is decoded once, and its
figures stand in the row of each of its ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.entrypoints.acceptance import sample_acceptance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outrider.entrypoints.acceptance import AcceptanceRow, AcceptanceSample, Interval
    from outrider.entrypoints.llm import LLM
    from outrider.entrypoints.prompt_encoder import EncodedPrompt


@dataclass(frozen=True)
class Way:
    """One way of decoding a suite.

    Attributes:
        suite: name of the prompts.
        k: drafts per step.
        temperature: of target and drafts.
        draft_sample_method: "probabilistic" or "greedy" (one-hot).
        rule: "standard", "block" or "coupled".
    """

    suite: str
    k: int
    temperature: float
    draft_sample_method: str
    rule: str

    @classmethod
    def of(cls, row: AcceptanceRow) -> Way:
        """The one that a row is about."""
        return cls(row.suite, row.k, row.temperature, row.draft_sample_method, row.rule)

    @property
    def is_greedy(self) -> bool:
        """Whether neither rule nor drafts make a difference."""
        return self.temperature == 0

    def canonical(self) -> Way:
        """The one that stands for all ways which give the very same texts in the same windows."""
        if self.is_greedy:
            return replace(self, draft_sample_method="greedy", rule="standard")
        if self.draft_sample_method == "greedy" and self.rule == "block":
            return replace(self, rule="standard")
        return self


@dataclass(frozen=True)
class AcceptanceGain:
    """What the rule `block` accepts beyond `standard`, prompt against prompt.

    Attributes:
        suite: name of the prompts.
        k: drafts per step.
        temperature: of target and drafts.
        draft_sample_method: "probabilistic"; with one-hot drafts there is nothing to gain.
        rule: "block".
        against: "standard".
        prompts: how many.
        gain: difference of the mean acceptance lengths.
        ci95: its 95 % interval over prompts; None of a single prompt.
    """

    suite: str
    k: int
    temperature: float
    draft_sample_method: str
    rule: str
    against: str
    prompts: int
    gain: float
    ci95: Interval | None


@dataclass(frozen=True)
class AcceptanceIntervals:
    """The 95 % intervals of a row that are not in it.

    Attributes:
        suite: as in the row, and so are the next four.
        k: drafts per step.
        temperature: of target and drafts.
        rule: of acceptance.
        draft_sample_method: of the drafts.
        mean_acceptance_length_fresh: None where the row has none, or of a single prompt.
        acceptance_rate_per_pos: one for each position; None where nothing was drafted.
    """

    suite: str
    k: int
    temperature: float
    rule: str
    draft_sample_method: str
    mean_acceptance_length_fresh: Interval | None
    acceptance_rate_per_pos: list[Interval | None]


@dataclass(frozen=True)
class SweepResult:
    """What a sweep has measured, by way, in the order in which it was asked for."""

    samples: dict[Way, AcceptanceSample]

    @property
    def rows(self) -> list[AcceptanceRow]:
        """One for each way."""
        return [
            sample.row(
                suite=way.suite,
                temperature=way.temperature,
                rule=way.rule,
                draft_sample_method=way.draft_sample_method,
            )
            for way, sample in self.samples.items()
        ]

    @property
    def intervals(self) -> list[AcceptanceIntervals]:
        """One for each of `rows`, in their order."""
        return [
            AcceptanceIntervals(
                suite=way.suite,
                k=way.k,
                temperature=way.temperature,
                rule=way.rule,
                draft_sample_method=way.draft_sample_method,
                mean_acceptance_length_fresh=sample.length_ci95(sample.fresh_length),
                acceptance_rate_per_pos=[
                    None if rate is None else rate.ci95(0, 1) for rate in sample.rate_per_pos
                ],
            )
            for way, sample in self.samples.items()
        ]

    @property
    def gains(self) -> list[AcceptanceGain]:
        """One wherever both rules were measured and differ."""
        return [
            self._gain(way, other)
            for way in self.samples
            if way.rule == "block" and way.canonical() == way
            for other in [replace(way, rule="standard")]
            if other in self.samples
        ]

    def _gain(self, way: Way, other: Way) -> AcceptanceGain:
        sample = self.samples[way]
        difference = sample.length.minus(self.samples[other].length)
        return AcceptanceGain(
            suite=way.suite,
            k=way.k,
            temperature=way.temperature,
            draft_sample_method=way.draft_sample_method,
            rule=way.rule,
            against=other.rule,
            prompts=len(sample.texts),
            gain=difference.value,
            ci95=difference.ci95(-way.k, way.k),
        )


@dataclass
class AcceptanceSweep:
    """Suites, decoded in every way.

    Attributes:
        llm: drafts with at least max(ks) tokens per step.
        suites: prompts by name.
        ks: drafts per step.
        temperatures: 0 is greedy.
        draft_sample_methods: "probabilistic", "greedy" or both.
        rules: some of "standard", "block" and "coupled".
        max_tokens: of each text at most, 3 or more.
        seed: 0 or more; a prompt has the same seed in every way.
        on_finish: called with the index of a prompt when its text has ended.
        on_sample: called with what was just measured.
    """

    llm: LLM
    suites: Mapping[str, Sequence[EncodedPrompt]]
    ks: Sequence[int]
    temperatures: Sequence[float]
    draft_sample_methods: Sequence[str]
    rules: Sequence[str]
    max_tokens: int
    seed: int
    on_finish: Callable[[int], object] | None = None
    on_sample: Callable[[Way, AcceptanceSample], object] | None = None

    @property
    def ways(self) -> list[Way]:
        """All combinations."""
        return [
            Way(suite, k, temperature, method, rule)
            for suite in self.suites
            for k in self.ks
            for temperature in self.temperatures
            for method in self.draft_sample_methods
            for rule in self.rules
        ]

    @property
    def num_texts(self) -> int:
        """How many will be decoded, where what is one counts once."""
        return sum(len(self.suites[way.suite]) for way in {way.canonical() for way in self.ways})

    def run(self) -> SweepResult:
        """Decode all that is asked for.

        Raises:
            OutriderError: a prompt cannot run, or a text came to no draft.
        """
        llms = {method: self._llm(method) for method in self.draft_sample_methods}
        measured: dict[Way, AcceptanceSample] = {}
        samples: dict[Way, AcceptanceSample] = {}
        for way in self.ways:
            one = way.canonical()
            if one not in measured:
                measured[one] = self._sample(llms[way.draft_sample_method], way)
                if self.on_sample is not None:
                    self.on_sample(way, measured[one])
            samples[way] = measured[one]
        return SweepResult(samples)

    def _sample(self, llm: LLM, way: Way) -> AcceptanceSample:
        return sample_acceptance(
            llm,
            self.suites[way.suite],
            temperature=way.temperature,
            rule=way.rule,
            max_tokens=self.max_tokens,
            seed=self.seed,
            k=way.k,
            on_finish=self.on_finish,
        )

    def _llm(self, draft_sample_method: str) -> LLM:
        speculative = self.llm.llm_engine.config.speculative
        assert speculative is not None, "a sweep needs drafts"
        if speculative.draft_sample_method == draft_sample_method:
            return self.llm
        changed = replace(speculative, draft_sample_method=draft_sample_method)  # type: ignore[arg-type] # checked there
        return self.llm.with_speculative(changed)
