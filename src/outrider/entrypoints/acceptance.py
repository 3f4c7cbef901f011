"""How much of what is drafted is accepted, over prompts, with intervals.

A window is what one request emits in one step that verified drafts. A generated token is *repeated*
if the 8-gram ending at it also ends within the previous 64 generated tokens, of generated tokens
alone; a window with a repeated token in it is not *fresh*. A text that goes round in a circle is
easy to draft, so the figure over fresh windows stands beside that over all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.config import LEAST_DRAFTED_TOKENS
from outrider.entrypoints.decode_run import DecodeRun
from outrider.entrypoints.ratio_estimate import RatioEstimate
from outrider.errors import ConfigError, RequestError
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.metrics import SpecDecodeMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.entrypoints.llm import LLM
    from outrider.entrypoints.prompt_encoder import EncodedPrompt
    from outrider.outputs import CompletionOutput

    Interval = tuple[float, float]

NGRAM_SIZE = 8
REPETITION_REACH = 64


@dataclass(frozen=True)
class AcceptanceRow:
    """One measurement, under the names of the command line's JSON.

    Attributes:
        suite: name of the set of prompts.
        k: drafts per step.
        temperature: of target and drafts.
        rule: "standard", "block" or "coupled"; at temperature 0 they are one.
        draft_sample_method: "probabilistic" or "greedy" (one-hot drafts).
        prompts: how many.
        mean_acceptance_length: 1 + accepted / windows, in [1, k + 1].
        ci95: its 95 % interval over prompts; None of a single prompt.
        mean_acceptance_length_fresh: of fresh windows alone; None where there are none.
        acceptance_rate: accepted / drafted tokens.
        acceptance_rate_per_pos: accepted / drafted at each of the k positions.
        repeated_share: repeated / generated tokens.
    """

    suite: str
    k: int
    temperature: float
    rule: str
    draft_sample_method: str
    prompts: int
    mean_acceptance_length: float
    ci95: Interval | None
    mean_acceptance_length_fresh: float | None
    acceptance_rate: float
    acceptance_rate_per_pos: list[float]
    repeated_share: float


@dataclass
class TextAcceptance:
    """What drafting brought to the text of one prompt, or to those of several.

    Attributes:
        windows: sums over all steps.
        fresh_windows: sums over the fresh windows.
        num_tokens: generated.
        num_repeated_tokens: of those.
    """

    windows: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    fresh_windows: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    num_tokens: int = 0
    num_repeated_tokens: int = 0

    @classmethod
    def of(cls, output: CompletionOutput) -> TextAcceptance:
        """Counts a text that has ended."""
        is_repeated = repeated_tokens(output.token_ids)
        text = cls(num_tokens=len(is_repeated), num_repeated_tokens=sum(is_repeated))
        start = 0
        for step in output.steps:
            end = start + step.num_tokens
            counts = (step.num_draft_tokens, step.num_accepted_tokens, step.num_tokens)
            text.windows.observe(*counts)
            if step.num_draft_tokens and not any(is_repeated[start:end]):
                text.fresh_windows.observe(*counts)
            start = end
        return text

    def merge(self, other: TextAcceptance) -> None:
        """Adds another text."""
        self.windows.merge(other.windows)
        self.fresh_windows.merge(other.fresh_windows)
        self.num_tokens += other.num_tokens
        self.num_repeated_tokens += other.num_repeated_tokens


@dataclass(frozen=True)
class AcceptanceSample:
    """The texts of several prompts, decoded in one way.

    Attributes:
        k: drafts per step.
        texts: one for each prompt, in their order.
    """

    k: int
    texts: list[TextAcceptance]

    @property
    def total(self) -> TextAcceptance:
        """The sums over all texts."""
        total = TextAcceptance(SpecDecodeMetrics(self.k), SpecDecodeMetrics(self.k))
        for text in self.texts:
            total.merge(text)
        return total

    @property
    def length(self) -> RatioEstimate:
        """The mean acceptance length over all windows."""
        estimate = _length([text.windows for text in self.texts])
        if estimate is None:
            raise RequestError(
                f"no drafts were verified in the {len(self.texts)} texts: take other prompts or "
                "more max_tokens"
            )
        return estimate

    @property
    def fresh_length(self) -> RatioEstimate | None:
        """The mean acceptance length over fresh windows; None where there are none."""
        return _length([text.fresh_windows for text in self.texts])

    @property
    def rate_per_pos(self) -> list[RatioEstimate | None]:
        """Accepted per draft at each position; None where nothing was drafted there."""
        windows = [text.windows for text in self.texts]
        return [
            RatioEstimate.over(
                [_at(one.num_accepted_tokens_per_pos, position) for one in windows],
                [_at(one.num_draft_tokens_per_pos, position) for one in windows],
            )
            for position in range(self.k)
        ]

    def length_ci95(self, estimate: RatioEstimate | None) -> Interval | None:
        """The 95 % interval of a length, which is from 1 to k + 1."""
        return None if estimate is None else estimate.ci95(1, self.k + 1)

    def row(
        self, *, suite: str, temperature: float, rule: str, draft_sample_method: str
    ) -> AcceptanceRow:
        """The figures, with the names of what was measured."""
        length, fresh, total = self.length, self.fresh_length, self.total
        return AcceptanceRow(
            suite=suite,
            k=self.k,
            temperature=temperature,
            rule=rule,
            draft_sample_method=draft_sample_method,
            prompts=len(self.texts),
            mean_acceptance_length=length.value,
            ci95=self.length_ci95(length),
            mean_acceptance_length_fresh=None if fresh is None else fresh.value,
            acceptance_rate=total.windows.acceptance_rate,
            acceptance_rate_per_pos=total.windows.acceptance_rate_per_pos,
            repeated_share=total.num_repeated_tokens / total.num_tokens,
        )


def sample_acceptance(
    llm: LLM,
    prompts: Sequence[EncodedPrompt],
    *,
    temperature: float,
    rule: str,
    max_tokens: int,
    seed: int,
    k: int | None = None,
    on_finish: Callable[[int], object] | None = None,
) -> AcceptanceSample:
    """Decode prompts with the drafts that an `LLM` is set to make, and count what is accepted.

    Args:
        llm: with drafts; how they are drawn is its own (`LLM.with_speculative`).
        prompts: at least one; as many run at once as the engine has room for.
        temperature: of target and drafts.
        rule: "standard", "block" or "coupled"; without effect at temperature 0.
        max_tokens: of each text at most, 3 or more.
        seed: 0 or more; prompt i draws with `seed + i`, whoever else runs.
        k: drafts per step, at most those of the `LLM`; None is as many.
        on_finish: called with the index of a prompt when its text has ended.
    """
    most = llm.llm_engine.config.num_speculative_tokens
    if not most:
        raise ConfigError("acceptance needs drafts: give speculative_config")
    if not prompts:
        raise RequestError("acceptance needs at least one prompt")
    if max_tokens < LEAST_DRAFTED_TOKENS:
        raise RequestError(
            f"max_tokens must be {LEAST_DRAFTED_TOKENS} or more for a draft to fit, "
            f"got {max_tokens}"
        )
    if seed < 0:
        raise RequestError(f"seed must be 0 or more, got {seed}")
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed + index,
            detokenize=False,
            num_speculative_tokens=k,
            rejection_sample_method=rule,  # type: ignore[arg-type] # SamplingParams checks it
        )
        for index in range(len(prompts))
    ]
    texts = []
    results = DecodeRun(llm.llm_engine, on_finish=on_finish).run(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        output = result.outputs[0]
        if output.finish_reason == "error":
            raise RequestError(f"{prompt.name}: the model's probabilities are not finite")
        texts.append(TextAcceptance.of(output))
    return AcceptanceSample(most if k is None else k, texts)


def repeated_tokens(token_ids: Sequence[int]) -> list[bool]:
    """Whether each generated token is repeated: its 8-gram has just ended once before.

    Args:
        token_ids: generated, without the prompt. The first seven have no 8-gram yet.
    """
    last_ends: dict[tuple[int, ...], int] = {}
    is_repeated = [False] * min(len(token_ids), NGRAM_SIZE - 1)
    for end in range(NGRAM_SIZE - 1, len(token_ids)):
        ngram = tuple(token_ids[end - NGRAM_SIZE + 1 : end + 1])
        last_end = last_ends.get(ngram)
        is_repeated.append(last_end is not None and end - last_end <= REPETITION_REACH)
        last_ends[ngram] = end
    return is_repeated


def _length(windows: Sequence[SpecDecodeMetrics]) -> RatioEstimate | None:
    """1 + accepted per window with drafts."""
    accepted = [one.num_accepted_tokens for one in windows]
    ratio = RatioEstimate.over(accepted, [one.num_drafts for one in windows])
    return None if ratio is None else ratio.plus(1.0)


def _at(counts: Sequence[int], position: int) -> int:
    """A count by position, 0 past the end of a list that drafts have not lengthened."""
    return counts[position] if position < len(counts) else 0
