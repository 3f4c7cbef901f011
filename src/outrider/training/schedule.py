"""Learning rate as a fraction of its peak: warm-up, constant, decay at the end of the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from outrider.training.config import ScheduleConfig


@dataclass
class Progress:
    """How far a run has come; with the weights and the optimiser this is all a resume needs."""

    step: int = 0
    num_tokens: int = 0  # rows trained on
    elapsed_s: float = 0.0  # wall clock inside the loop, over all resumes

    def fraction(self, config: ScheduleConfig) -> float:
        """Returns the part of the budget that is used, 1 or more when the run is over."""
        used = [0.0]
        if config.max_tokens is not None:
            used.append(self.num_tokens / config.max_tokens)
        if config.max_minutes is not None:
            used.append(self.elapsed_s / (60.0 * config.max_minutes))
        return max(used)


def learning_rate_factor(progress: Progress, config: ScheduleConfig) -> float:
    """Returns the rate of the coming step in units of the peak.

    The weights before the decay are where a longer run goes on from, so the decay is short and
    linear: it can be run again from any checkpoint of the constant part.
    """
    warmup = min(1.0, (progress.step + 1) / max(1, config.warmup_steps))
    remaining = max(0.0, 1.0 - progress.fraction(config))
    if remaining >= config.decay_fraction:
        return warmup
    decay = (
        config.final_fraction + (1.0 - config.final_fraction) * remaining / config.decay_fraction
    )
    return min(warmup, decay)


def set_learning_rate(
    optimizer: Optimizer, progress: Progress, config: ScheduleConfig, peak: float
) -> None:
    """Gives all parameters of an optimiser the rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = peak * learning_rate_factor(progress, config)
