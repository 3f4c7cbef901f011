"""Ratios over prompts: by hand, and that an interval of 95 % holds the truth as often."""

import math
import random

import pytest

from outrider.entrypoints.ratio_estimate import Z95, RatioEstimate


def test_by_hand() -> None:
    # 12 of 20. The prompts are off by 1 - 0.6 * 4, 5 - 0.6 * 6 and 6 - 0.6 * 10.
    estimate = RatioEstimate.over([1, 5, 6], [4, 6, 10])
    assert estimate is not None
    assert estimate.value == pytest.approx(0.6)
    assert estimate.deviations == pytest.approx((-1.4 / 20, 1.4 / 20, 0))
    error = math.sqrt(3 / 2 * 2 * (1.4 / 20) ** 2)
    assert estimate.standard_error == pytest.approx(error)
    assert estimate.plus(1).value == pytest.approx(1.6)
    assert estimate.plus(1).ci95(1, 4) == pytest.approx((1.6 - Z95 * error, 1.6 + Z95 * error))
    assert estimate.ci95(0.55, 0.65) == (0.55, 0.65)


def test_of_one_size_it_is_the_standard_error_of_the_mean() -> None:
    parts = [3.0, 1.0, 4.0, 1.0]
    estimate = RatioEstimate.over(parts, [1] * 4)
    assert estimate is not None
    variance = sum((part - 2.25) ** 2 for part in parts) / 3
    assert estimate.standard_error == pytest.approx(math.sqrt(variance / 4))


def test_a_difference_is_paired() -> None:
    # Prompts that differ much, and one way that is better by 1 of 10 for each of them.
    some, others = (
        RatioEstimate.over([2 + gain, 3 + gain, 8 + gain], [10, 10, 10]) for gain in (0, 1)
    )
    assert some is not None
    assert others is not None
    difference = others.minus(some)
    assert difference.value == pytest.approx(0.1)
    assert difference.standard_error == pytest.approx(0)
    assert some.standard_error == pytest.approx(math.sqrt(3 / 2 * (7**2 + 4**2 + 11**2)) / 90)


def test_what_there_is_not() -> None:
    assert RatioEstimate.over([0, 0], [0, 0]) is None
    assert RatioEstimate.over([], []) is None
    one = RatioEstimate.over([1], [2])
    assert one is not None
    assert (one.value, one.standard_error, one.ci95(0, 1)) == (0.5, None, None)


def test_intervals_hold_the_truth() -> None:
    # Prompts differ in how easy they are and in how many windows they have, easy ones having fewer:
    # the truth is E[part] / E[whole], and each window of a prompt counts for little by itself.
    chance, num_trials, hits, naive_hits = random.Random(0), 400, 0, 0
    truth = (0.9 * 20 + 0.3 * 60) / 80
    for _ in range(num_trials):
        parts, wholes = [], []
        for _ in range(60):
            ease, whole = chance.choice(((0.9, 20), (0.3, 60)))
            parts.append(sum(chance.random() < ease for _ in range(whole)))
            wholes.append(whole)
        estimate = RatioEstimate.over(parts, wholes)
        assert estimate is not None
        low, high = estimate.ci95(0, 1) or (1, 0)
        hits += low <= truth <= high
        error = math.sqrt(estimate.value * (1 - estimate.value) / sum(wholes))
        naive_hits += abs(estimate.value - truth) <= Z95 * error
    # Of 400 trials at 95 %, fewer than 366 or more than 392 have a probability below 0.5 %.
    assert 366 <= hits <= 392
    # As if all windows were independent: what the interval is not.
    assert naive_hits < 300
