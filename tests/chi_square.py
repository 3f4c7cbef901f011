"""Pearson's chi-square test, for tests of what a random draw follows."""

import torch
from torch import Tensor


def chi_square_p_value(counts: Tensor, probs: Tensor) -> float:
    """Probability of counts at least this far from `probs` if they follow it.

    A test that passes above 1e-6 raises one false alarm in a million seeds; with the seed fixed it
    raises none, and the bound says how often choosing another seed would.

    Args:
        counts: integer counts of any shape.
        probs: of the same shape, sums to 1. An entry of probability 0 must not have been counted;
            the others should expect 5 counts or more.
    """
    counts, probs = counts.flatten().double(), probs.flatten().double()
    is_possible = probs > 0
    if counts[~is_possible].any():
        return 0.0
    counts, expected = counts[is_possible], probs[is_possible] * counts.sum()
    assert expected.min() >= 5, "too few trials for the smallest probability"
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2)
    )


def count_tuples(tokens: Tensor, vocab_size: int) -> Tensor:
    """[N, M] ids to [V, ..., V] (M times) counts of the N tuples."""
    index = torch.zeros_like(tokens[:, 0])
    for column in tokens.unbind(-1):
        index = index * vocab_size + column
    counts = index.bincount(minlength=vocab_size ** tokens.shape[1])
    return counts.view([vocab_size] * tokens.shape[1])


def product_law(rows: list[Tensor]) -> Tensor:
    """[V] laws of M independent tokens to [V, ..., V] (M times), their joint law."""
    law = torch.ones((), dtype=torch.float64)
    for row in rows:
        law = law.unsqueeze(-1) * row.double()
    return law
