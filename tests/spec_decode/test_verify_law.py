"""One window is lossless: exact enumeration in float64, and mutations that must not pass it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outrider.spec_decode import block_verify, standard_verify
from outrider.spec_decode.verify_rules import block_prefix_ratios
from outrider.spec_decode.verify_window import VerifyWindow
from tests.spec_decode.window_law import (
    Draws,
    RuleLaw,
    Tables,
    block_law,
    emitted_law,
    final_law,
    first_failure_law,
    last_success_law,
    law_through_rule,
    standard_law,
    total_variation,
)

RULES = {"standard": (standard_law, standard_verify), "block": (block_law, block_verify)}
EXACT = 1e-12
OFF = 1e-3
PAIRS = [(seed, is_sparse) for seed in range(6) for is_sparse in (False, True)]


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_window_law_is_the_target_joint(rule: str, num_drafts: int) -> None:
    rule_law, verify = RULES[rule]
    for seed, is_sparse in PAIRS:
        tables = Tables.random(3, num_drafts, seed, is_sparse=is_sparse)
        draws = Draws.of(tables)
        law = rule_law(draws.window())
        torch.testing.assert_close(law.stop.sum(-1), torch.ones_like(draws.weight))
        assert total_variation(emitted_law(tables, draws, law), tables.joint()) < EXACT
        through = law_through_rule(tables, draws, law, verify, is_block=rule == "block")
        assert total_variation(through, tables.joint()) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_draft_length_may_depend_on_the_drafts_before(rule: str) -> None:
    """Nothing is drawn after some prefixes, and the block ends there."""
    rule_law, verify = RULES[rule]
    for seed, is_sparse in PAIRS:
        tables = Tables.random(3, 3, seed, is_sparse=is_sparse)
        draws = Draws.of(tables)
        num_drawn = torch.where(draws.token_ids[:, 0] == 1, 1, 3)
        num_drawn = torch.where(draws.token_ids[:, :2].sum(-1) == 0, 2, num_drawn)
        draws = draws.with_placeholders(num_drawn)
        law = rule_law(draws.window())
        assert (law.stop[num_drawn == 1][:, 2:] == 0).all()
        assert total_variation(emitted_law(tables, draws, law), tables.joint()) < EXACT
        through = law_through_rule(tables, draws, law, verify, is_block=rule == "block")
        assert total_variation(through, tables.joint()) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("broken", ["draft", "target"])
def test_rows_that_are_not_finite_keep_the_law(rule: str, broken: str) -> None:
    """A broken draft row ends the block; before a broken target row the last kept draft stands."""
    rule_law, verify = RULES[rule]
    for seed in range(4):
        tables = Tables.random(3, 3, seed, is_sparse=False)
        draws = Draws.of(tables)
        is_hit = draws.token_ids[:, 0] == 2
        if broken == "draft":
            draws.draft_probs[is_hit, 1] = torch.nan
        else:
            draws.target_probs[is_hit, 1] = torch.nan
            draws.target_probs[draws.token_ids.sum(-1) == 0, 3] = torch.inf
        law = rule_law(draws.window())
        law = replace(law, final=law.final.nan_to_num(1 / 3, 1 / 3))
        through = law_through_rule(tables, draws, law, verify, is_block=rule == "block")
        assert total_variation(through, tables.joint()) < EXACT


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_block_keeps_at_least_as_many_drafts(num_drafts: int) -> None:
    gains = []
    for seed, is_sparse in PAIRS:
        draws = Draws.of(Tables.random(3, num_drafts, seed, is_sparse=is_sparse))
        standard, block = (
            mean_kept(law(draws.window()), draws) for law in (standard_law, block_law)
        )
        gains.append(block - standard)
    assert min(gains) > -EXACT
    assert max(gains) > 0.05 if num_drafts > 1 else max(gains) < EXACT


def test_one_hot_drafts_gain_nothing_from_block() -> None:
    """The block thresholds on explicit one-hot rows give the law of the standard rule."""
    for seed, is_sparse in PAIRS:
        tables = Tables.random(3, 3, seed, is_sparse=is_sparse)
        draws = Draws.of(tables)
        one_hot = torch.nn.functional.one_hot(draws.token_ids, 3).double()
        window = VerifyWindow.open(draws.token_ids, one_hot, draws.target_probs)
        standard, block = standard_law(window), block_law(window)
        torch.testing.assert_close(block.stop, standard.stop, rtol=0, atol=EXACT)
        is_reached = (standard.stop > 1e-9).unsqueeze(-1)
        torch.testing.assert_close(block.final * is_reached, standard.final * is_reached)


def mean_kept(law: RuleLaw, draws: Draws) -> float:
    return float((draws.weight @ law.stop) @ torch.arange(law.stop.shape[1]).double())


def token_wise_residual(window: VerifyWindow) -> RuleLaw:
    return replace(block_law(window), final=final_law(window, None))


def no_look_ahead(window: VerifyWindow) -> RuleLaw:
    coin = block_prefix_ratios(window)[:, 1:]
    return replace(block_law(window), stop=last_success_law(coin))


def stop_at_first_failure(window: VerifyWindow) -> RuleLaw:
    law = block_law(window)
    return replace(law, stop=first_failure_law(law.coin))


def swapped_ratio(window: VerifyWindow) -> RuleLaw:
    inverse = (1 / window.ratios).nan_to_num(0, 0, 0).where(window.ratios > 0, 1)
    return replace(standard_law(window), stop=standard_law(replace(window, ratios=inverse)).stop)


def swapped_ratio_block(window: VerifyWindow) -> RuleLaw:
    inverse = (1 / window.ratios).nan_to_num(0, 0, 0).where(window.ratios > 0, 1)
    return block_law(replace(window, ratios=inverse))


def swapped_residual(window: VerifyWindow) -> RuleLaw:
    law = standard_law(window)
    assert window.draft_probs is not None
    swapped = replace(
        window,
        draft_probs=window.target_probs[:, :-1],
        target_probs=torch.cat([window.draft_probs, window.target_probs[:, -1:]], 1),
    )
    return replace(law, final=final_law(swapped, None))


def redraw_from_target(window: VerifyWindow) -> RuleLaw:
    return replace(standard_law(window), final=window.target_probs)


def redraw_from_target_block(window: VerifyWindow) -> RuleLaw:
    return replace(block_law(window), final=window.target_probs)


@pytest.mark.parametrize(
    "mutation",
    [
        token_wise_residual,
        no_look_ahead,
        stop_at_first_failure,
        swapped_ratio,
        swapped_ratio_block,
        swapped_residual,
        redraw_from_target,
        redraw_from_target_block,
    ],
)
def test_enumeration_sees_a_mutated_rule(mutation: Callable[[VerifyWindow], RuleLaw]) -> None:
    distances = []
    for seed, _ in PAIRS:
        tables = Tables.random(3, 3, seed, is_sparse=False)
        draws = Draws.of(tables)
        law = emitted_law(tables, draws, mutation(draws.window()))
        distances.append(total_variation(law, tables.joint()))
    assert max(distances) > OFF, f"the test has no power against {mutation.__name__}"


def test_enumeration_sees_a_draft_law_of_another_temperature() -> None:
    """Drafts drawn at temperature 1 and judged as if at 0.7."""
    for rule_law, _ in RULES.values():
        tables = Tables.random(3, 3, 0, is_sparse=False)
        draws = Draws.of(tables)
        cooled = replace(draws, draft_probs=(draws.draft_probs.log() / 0.7).softmax(-1))
        law = emitted_law(tables, draws, rule_law(cooled.window()))
        assert total_variation(law, tables.joint()) > OFF
