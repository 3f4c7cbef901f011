"""A ratio of sums over prompts, and how far it may be off: acceptance lengths and rates.

Windows of one text resemble each other, so what is drawn at random is the prompt, and the error of
a ratio is that of its prompts. To first order (the delta method, as for cluster samples) the ratio
r = sum of parts / sum of wholes moves with each prompt by

    e_i = (part_i - r * whole_i) / sum of wholes        and    variance = n / (n - 1) * sum of e_i^2

over n prompts. The difference of two ratios over the same prompts moves with e_i - f_i: what makes
a prompt easy for both cancels out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Quantile of the normal law, which is close from some dozens of prompts on.
Z95 = 1.959964


@dataclass(frozen=True)
class RatioEstimate:
    """A ratio over prompts, or a difference of two.

    Attributes:
        value: the ratio.
        deviations: of each prompt, e_i above; their sum is 0.
    """

    value: float
    deviations: tuple[float, ...]

    @classmethod
    def over(cls, parts: Sequence[float], wholes: Sequence[float]) -> RatioEstimate | None:
        """The sum of parts over the sum of wholes.

        Args:
            parts: one for each prompt.
            wholes: one for each prompt; a prompt with nothing in it has 0.

        Returns:
            None where all wholes are 0: there is no such ratio.
        """
        total = sum(wholes)
        if not total:
            return None
        value = sum(parts) / total
        pairs = zip(parts, wholes, strict=True)
        return cls(value, tuple((part - value * whole) / total for part, whole in pairs))

    def minus(self, other: RatioEstimate) -> RatioEstimate:
        """The difference to a ratio over the same prompts, in the same order."""
        pairs = zip(self.deviations, other.deviations, strict=True)
        return RatioEstimate(self.value - other.value, tuple(a - b for a, b in pairs))

    def plus(self, constant: float) -> RatioEstimate:
        """The ratio and a constant."""
        return RatioEstimate(self.value + constant, self.deviations)

    @property
    def standard_error(self) -> float | None:
        """Of the value; None of a single prompt, which says nothing of others."""
        n = len(self.deviations)
        if n < 2:
            return None
        return math.sqrt(n / (n - 1) * sum(one * one for one in self.deviations))

    def ci95(self, least: float, most: float) -> tuple[float, float] | None:
        """The 95 % interval, cut to what is possible; None of a single prompt."""
        error = self.standard_error
        if error is None:
            return None
        low, high = self.value - Z95 * error, self.value + Z95 * error
        return min(max(low, least), most), max(min(high, most), least)
