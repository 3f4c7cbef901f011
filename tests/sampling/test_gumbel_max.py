"""Drawing by the argmax of log probability plus noise."""

import torch

from outrider.sampling import gumbel_noise, sample_with_gumbel
from tests.chi_square import chi_square_p_value


def test_law_of_the_draws() -> None:
    law = torch.tensor([0.05, 0.0, 0.2, 0.5, 0.0, 0.25])
    seeds = torch.arange(200_000)
    zero = torch.zeros_like(seeds)
    drawn = sample_with_gumbel(law, gumbel_noise(seeds, zero, zero, 6))
    # One false alarm in a million choices of seeds.
    assert chi_square_p_value(drawn.bincount(minlength=6), law) > 1e-6


def test_one_hot_rows_ignore_the_noise() -> None:
    probs = torch.eye(5)
    noise = torch.randn(5, 5, dtype=torch.float64) * 30
    assert sample_with_gumbel(probs, noise).tolist() == [0, 1, 2, 3, 4]


def test_equal_scores_go_to_the_lowest_id() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    assert sample_with_gumbel(probs, torch.zeros(1, 4)).tolist() == [1]


def test_scale_of_a_row_does_not_matter() -> None:
    probs = torch.rand(50, 20, dtype=torch.float64)
    noise = torch.randn(50, 20, dtype=torch.float64)
    assert torch.equal(sample_with_gumbel(probs * 3, noise), sample_with_gumbel(probs, noise))
