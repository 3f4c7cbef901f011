"""The way of an output through its grammar, whatever was asked about it before."""

import random

import pytest
from numpy import int32
from numpy.typing import NDArray

from outrider.grammar.grammar_path import BUDGET_PER_TOKEN_S, BUDGET_S, GrammarPath
from tests.grammar.toy_grammar import EDGES, END, ToyMatcher, allowed_ids, ids_of, toy_path


def test_the_answer_depends_on_the_text_alone() -> None:
    """Drafts come and go, some of them are none of the grammar, and the output grows."""
    random_numbers = random.Random(7)
    num_checked = 0
    for _ in range(200):
        path, output = toy_path(), [int(i) for i in random_numbers.choices([0, 2], k=2)]
        for _ in range(8):
            drafts = random_numbers.choices(range(4), k=random_numbers.randrange(5))
            for depth in range(len(drafts) + 1):
                text = output + drafts[:depth]
                found = ids_of(path.allowed_after(text, len(output)))
                assert found == allowed_ids(EDGES, text)
                num_checked += 1
            allowed = allowed_ids(EDGES, output)
            if allowed is None:
                break
            kept = path.num_allowed(output, len(output), drafts)
            output += drafts[: random_numbers.randint(0, kept)]
            allowed = allowed_ids(EDGES, output)
            if allowed is not None:
                output.append(random_numbers.choice(sorted(allowed)))
    assert num_checked > 2_000


def test_a_mask_is_made_once() -> None:
    """Verification asks for what drafting asked for, and the next window begins where it ends."""
    matcher = ToyMatcher()
    path = GrammarPath(matcher)
    for depth in range(3):
        path.allowed_after([0, 1, 2, 0][: 1 + depth], 1)
    for depth in range(4):
        path.allowed_after([0, 1, 2, 0][: 1 + depth], 1)
    assert matcher.num_bitmasks == 4
    path.allowed_after([0, 1, 2], 3)
    assert matcher.num_bitmasks == 4


def test_drafts_are_allowed_up_to_the_first_that_is_not() -> None:
    path = toy_path()
    assert path.num_allowed([0], 1, [1, 2, 1, 1, 2]) == 3
    assert path.num_allowed([0], 1, [3]) == 0
    assert path.num_allowed([0], 1, [2, END, 0]) == 2
    assert ids_of(path.allowed_after([0], 1)) == {0, 1, 2}


def test_nothing_is_said_after_the_end() -> None:
    path = toy_path()
    assert path.allowed_after([2, END], 1) is None
    assert path.allowed_after([2, END, 0], 1) is None
    assert ids_of(path.allowed_after([2], 1)) == {0, 1, END}


@pytest.mark.parametrize("num_certain", [1, 2])
def test_stuck_is_an_output_that_nothing_may_follow(num_certain: int) -> None:
    """A draft that leads nowhere is the draft's affair."""
    path = toy_path({0: {0: 0, 1: 1}, 1: {}})
    assert ids_of(path.allowed_after([0, 1], num_certain)) == set()
    assert path.is_stuck == (num_certain == 2)


def test_a_grammar_that_takes_too_long_is_stuck_at_the_next_token() -> None:
    """Drafts are cut short first; the output ends where the budget of its tokens is used up."""
    now_s, cost_s = 0.0, 0.0

    class SlowMatcher(ToyMatcher):
        def bitmask(self) -> NDArray[int32] | None:
            nonlocal now_s
            now_s += cost_s
            return super().bitmask()

    path = GrammarPath(SlowMatcher(), lambda: now_s)
    cost_s = BUDGET_PER_TOKEN_S
    for length in range(1, 200):
        assert ids_of(path.allowed_after([0] * length, length)) == {0, 1, 2}
    cost_s = BUDGET_S + BUDGET_PER_TOKEN_S
    assert ids_of(path.allowed_after([0] * 201, 200)) == set()
    assert not path.is_stuck
    assert ids_of(path.allowed_after([0] * 200, 200)) == set()
    assert path.is_stuck
