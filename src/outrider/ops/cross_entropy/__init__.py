"""Cross entropy of hidden rows under a vocabulary matrix, for training."""

from outrider.ops.cross_entropy.sequence import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
