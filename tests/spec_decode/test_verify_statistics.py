"""What the rules emit over many trials, with the random streams the engine uses.

Trials are seeds 0, 1, 2, ... A chi-square test passes above p = 1e-6, so one choice of seeds in a
million would fail a right rule; a test of power demands p < 1e-12 of a wrong one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID
from outrider.sampling import (
    Purpose,
    SamplingTensors,
    compute_probs,
    gumbel_noise,
    sample_from_probs,
    sample_with_gumbel,
    uniforms,
)
from outrider.spec_decode import VerifyResult, block_verify, coupled_verify, standard_verify
from tests.chi_square import chi_square_p_value, count_tuples, product_law

RULES = {"standard": standard_verify, "block": block_verify}
PASSES, FAILS = 1e-6, 1e-12
# The two-token toy: drafts prefer what the target does not.
TOY_DRAFT, TOY_TARGET = torch.tensor([2 / 3, 1 / 3]).double(), torch.tensor([1 / 3, 2 / 3]).double()

Key = Callable[[Tensor, Tensor, Purpose], Tensor]


@dataclass(frozen=True)
class Trials:
    """Texts of `num_tokens` tokens under laws that do not depend on the context, one per seed."""

    draft_law: Tensor
    target_law: Tensor
    num_drafts: int
    num_trials: int = 200_000

    def window(self, rule: str, start: Tensor, key: Key) -> VerifyResult:
        """The window at `start` [N]: drafts by inverse CDF, then the rule."""
        depth = torch.arange(self.num_drafts + 1)
        draft_probs = self.draft_law.expand(len(start), self.num_drafts, -1).contiguous()
        target_probs = self.target_law.expand(len(start), self.num_drafts + 1, -1)
        drafts = sample_from_probs(draft_probs, key(start, depth[:-1], Purpose.DRAFT))
        accept, resample = (
            key(start, depth[:-1], Purpose.ACCEPT),
            key(start, depth, Purpose.RESAMPLE),
        )
        return RULES[rule](drafts, draft_probs, target_probs, accept, resample)

    def texts(self, rule: str, num_tokens: int, key: Key) -> Tensor:
        """[N, num_tokens]: windows until every text is long enough."""
        text = torch.zeros(self.num_trials, num_tokens + self.num_drafts + 1, dtype=torch.int64)
        length = torch.zeros(self.num_trials, dtype=torch.int64)
        while length.min() < num_tokens:
            result = self.window(rule, length, key)
            places = length.clamp(max=num_tokens).unsqueeze(-1) + torch.arange(self.num_drafts + 1)
            text.scatter_(-1, places, result.output_token_ids.clamp(min=0))
            length += result.num_accepted_tokens + 1
        return text[:, :num_tokens]


def window_key(start: Tensor, depth: Tensor, purpose: Purpose) -> Tensor:
    """The engine's: where the window starts, and the depth in it."""
    seeds = torch.arange(len(start)).unsqueeze(-1)
    return uniforms(seeds, torch.zeros_like(seeds), start.unsqueeze(-1), depth, purpose)


def token_key(start: Tensor, depth: Tensor, purpose: Purpose) -> Tensor:
    """The mistake: the position of the token alone."""
    seeds = torch.arange(len(start)).unsqueeze(-1)
    zero = torch.zeros_like(seeds)
    return uniforms(seeds, zero, start.unsqueeze(-1) + depth, zero, purpose)


@pytest.mark.parametrize(("rule", "mean"), [("standard", 10 / 9), ("block", 11 / 9)])
def test_two_token_toy(rule: str, mean: float) -> None:
    """C01: accepted drafts of the window, and the joint law of the first three tokens."""
    trials = Trials(TOY_DRAFT, TOY_TARGET, num_drafts=2)
    start = torch.zeros(trials.num_trials, dtype=torch.int64)
    kept = trials.window(rule, start, window_key).num_accepted_tokens.double()
    assert abs(kept.mean() - mean) < 4 * kept.std() / trials.num_trials**0.5
    counts = count_tuples(trials.texts(rule, 3, window_key), 2)
    assert chi_square_p_value(counts, product_law([TOY_TARGET] * 3)) > PASSES


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_joint_law_over_several_windows(rule: str, num_drafts: int) -> None:
    trials = Trials(TOY_DRAFT, TOY_TARGET, num_drafts)
    num_tokens = 2 * num_drafts + 2
    counts = count_tuples(trials.texts(rule, num_tokens, window_key), 2)
    assert chi_square_p_value(counts, product_law([TOY_TARGET] * num_tokens)) > PASSES


def test_key_of_the_token_position_alone_biases_block() -> None:
    """The next window meets uniforms that this one has looked at past its end."""
    trials = Trials(TOY_DRAFT, TOY_TARGET, num_drafts=2)
    law = product_law([TOY_TARGET] * 6)
    counts = count_tuples(trials.texts("block", 6, token_key), 2)
    assert chi_square_p_value(counts, law) < FAILS
    assert (counts / counts.sum() - law).abs().sum() / 2 > 0.05
    # The standard rule uses no number past its end, and would not show the mistake.
    counts = count_tuples(trials.texts("standard", 6, token_key), 2)
    assert chi_square_p_value(counts, law) > PASSES


THREE_DRAFT = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
THREE_TARGET = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)


def assert_share(flags: Tensor, expected: float) -> None:
    sigma = (expected * (1 - expected) / len(flags)) ** 0.5
    assert abs(flags.double().mean() - expected) < 4 * sigma


@pytest.mark.parametrize("rule", RULES)
def test_three_token_case(rule: str) -> None:
    """C05: the acceptance is the overlap of the laws, and what is emitted follows the target."""
    trials = Trials(THREE_DRAFT, THREE_TARGET, num_drafts=1)
    start = torch.zeros(trials.num_trials, dtype=torch.int64)
    result = trials.window(rule, start, window_key)
    assert_share(result.num_accepted_tokens == 1, 0.6)
    counts = result.output_token_ids[:, 0].bincount(minlength=3)
    assert chi_square_p_value(counts, THREE_TARGET) > PASSES


def test_three_token_case_coupled() -> None:
    num_trials = 200_000
    seeds, zero = torch.arange(num_trials), torch.zeros(num_trials, dtype=torch.int64)
    noise = torch.stack([gumbel_noise(seeds, zero, zero + i, 3) for i in range(2)], 1)
    drafts = sample_with_gumbel(THREE_DRAFT, noise[:, :1])
    result = coupled_verify(drafts, THREE_TARGET.expand(num_trials, 2, 3), noise)
    expected = sum(
        1 / torch.maximum(THREE_TARGET / THREE_TARGET[x], THREE_DRAFT / THREE_DRAFT[x]).sum()
        for x in range(3)
    )
    assert float(expected) == pytest.approx(0.578, abs=5e-4)
    assert_share(result.num_accepted_tokens == 1, float(expected))
    counts = result.output_token_ids[:, 0].bincount(minlength=3)
    assert chi_square_p_value(counts, THREE_TARGET) > PASSES
    # After a kept draft the token comes from the noise of the next place, and is independent of it.
    is_kept = result.num_accepted_tokens == 1
    pairs = count_tuples(result.output_token_ids[is_kept], 3)
    bonus_law = (pairs.sum(1) / pairs.sum()).unsqueeze(-1) * THREE_TARGET
    assert chi_square_p_value(pairs, bonus_law) > PASSES


def same_temperature(value: float, num_rows: int) -> SamplingTensors:
    off = [0.0] * num_rows
    return SamplingTensors.from_values([value] * num_rows, [0] * num_rows, [1.0] * num_rows, off)


def first_tokens(draft_row: Tensor, ratio_row: Tensor, target_row: Tensor, rule: str) -> Tensor:
    """[V] counts of the first token of windows of two drafts.

    Args:
        draft_row: [V], the law drafts are drawn from.
        ratio_row: [V], what the rule is told of it.
        target_row: [V].
        rule: name of the rule.
    """
    num_trials = 200_000
    start = torch.zeros(num_trials, dtype=torch.int64)
    depth = torch.arange(3)
    drafts = sample_from_probs(
        draft_row.expand(num_trials, 2, -1), window_key(start, depth[:2], Purpose.DRAFT)
    )
    result = RULES[rule](
        drafts,
        ratio_row.expand(num_trials, 2, -1),
        target_row.expand(num_trials, 3, -1),
        window_key(start, depth[:2], Purpose.ACCEPT),
        window_key(start, depth, Purpose.RESAMPLE),
    )
    return result.output_token_ids[:, 0].bincount(minlength=len(target_row))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("rule", RULES)
def test_first_token_follows_the_requests_temperature(rule: str, temperature: float) -> None:
    """C05, in float32 as decoding is. A wrong temperature anywhere must fail the same test."""
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(4))
    law = (logits[1].double() / temperature).softmax(-1)
    draft, target = compute_probs(logits, same_temperature(temperature, 2))
    draft_at_one, target_at_one = compute_probs(logits, same_temperature(1.0, 2))

    def p_value(draft_row: Tensor, ratio_row: Tensor, target_row: Tensor) -> float:
        return chi_square_p_value(first_tokens(draft_row, ratio_row, target_row, rule), law)

    assert p_value(draft, draft, target) > PASSES
    assert p_value(draft_at_one, draft_at_one, target) > PASSES
    assert p_value(draft, draft, target_at_one) < FAILS
    assert p_value(draft, draft_at_one, target) < FAILS


@pytest.mark.parametrize("rule", RULES)
def test_first_placeholder_gets_a_draw_from_the_target(rule: str) -> None:
    """C04 at temperature 1: nothing was drawn at depth 1, so no residual is owed there."""
    num_trials = 200_000
    start = torch.zeros(num_trials, dtype=torch.int64)
    depth = torch.arange(3)
    drafts = sample_from_probs(
        THREE_DRAFT.expand(num_trials, 2, 3), window_key(start, depth[:2], Purpose.DRAFT)
    )
    drafts[:, 1] = PLACEHOLDER_TOKEN_ID
    result = RULES[rule](
        drafts,
        THREE_DRAFT.expand(num_trials, 2, 3),
        THREE_TARGET.expand(num_trials, 3, 3),
        window_key(start, depth[:2], Purpose.ACCEPT),
        window_key(start, depth, Purpose.RESAMPLE),
    )
    is_kept = result.num_accepted_tokens == 1
    assert_share(is_kept, 0.6)
    assert (result.output_token_ids[~is_kept, 1:] == PLACEHOLDER_TOKEN_ID).all()
    counts = result.output_token_ids[is_kept, 1].bincount(minlength=3)
    assert chi_square_p_value(counts, THREE_TARGET) > PASSES


@pytest.mark.parametrize("rule", RULES)
def test_a_drawn_draft_found_invalid_takes_the_residual(rule: str) -> None:
    """C04: the target excludes an id that the draft law does not; a redraw would be biased."""
    target_law = torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64)
    counts = first_tokens(THREE_DRAFT, THREE_DRAFT, target_law, rule)
    assert chi_square_p_value(counts, target_law) > PASSES
    # What dropping the draft and drawing afresh gives: all drafts but the invalid one as before.
    overlap = torch.minimum(target_law, THREE_DRAFT)
    residual = (target_law - THREE_DRAFT).clamp(min=0)
    rejected = (THREE_DRAFT - overlap)[:2].sum()
    redrawn = overlap + rejected * residual / residual.sum() + THREE_DRAFT[2] * target_law
    assert chi_square_p_value(counts, redrawn) < FAILS
    assert (redrawn - target_law).abs().sum() / 2 > 0.02
