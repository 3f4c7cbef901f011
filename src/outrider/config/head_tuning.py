"""Options of `tune-head`: what is written, what is measured, and how the head is trained on it."""

from __future__ import annotations

import math
from collections.abc import Sequence  # noqa: TC003 - the types of the fields are read when run
from dataclasses import dataclass
from typing import Literal, get_args

from outrider.config.checks import check_bool, check_choice, check_int
from outrider.config.speculative import LEAST_DRAFTED_TOKENS
from outrider.errors import ConfigError, shown

LossKind = Literal["ce", "kl", "lk"]


@dataclass(frozen=True)
class HeadTuningConfig:
    """How a head is tuned to a workload.

    Attributes:
        loss: what the head is held to: "ce", the tokens (cross entropy); "kl", the model's law of
            them; "lk", a sum of KL and total variation, the share of drafts rejected at
            temperature 1.
        lk_lambda: weight of KL in "lk", from 0 to 1.
        temperatures: texts are written and measured at each of these; 0 is greedy.
        max_tokens: tokens of each text, 3 or more.
        num_samples: texts of a prompt at each temperature above 0.
        held_out_share: of the prompts, to measure on and not to tune on.
        num_epochs: how often each text is seen.
        max_minutes: of the training, which otherwise ends with its epochs, beside writing and
            measuring; None is no limit.
        batch_size: texts of a training step.
        learning_rate: its peak.
        compile: on the CPU, train with native kernels, built with the C++ compiler at hand.
        seed: of the split, the texts and their order, 0 or more.
    """

    loss: LossKind = "lk"
    lk_lambda: float = 0.5
    temperatures: Sequence[float] | str = "0,1"
    max_tokens: int = 128
    num_samples: int = 1
    held_out_share: float = 0.2
    num_epochs: int = 3
    max_minutes: float | None = None
    batch_size: int = 8
    learning_rate: float = 1e-3
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check each field, and make numbers of the temperatures."""
        check_choice("loss", self.loss, get_args(LossKind))
        for name, least in (
            ("max_tokens", LEAST_DRAFTED_TOKENS),
            ("num_samples", 1),
            ("num_epochs", 1),
            ("batch_size", 1),
            ("seed", 0),
        ):
            check_int(name, getattr(self, name), least)
        check_bool("compile", self.compile)
        if not 0.0 <= self.lk_lambda <= 1.0:
            raise ConfigError(f"lk_lambda must be from 0 to 1, got {shown(self.lk_lambda)}")
        if not 0.0 < self.held_out_share < 1.0:
            raise ConfigError(
                f"held_out_share must be above 0 and below 1, got {shown(self.held_out_share)}"
            )
        for name in ("max_minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {shown(value)}")
        object.__setattr__(self, "temperatures", _temperatures(self.temperatures))


def _temperatures(given: Sequence[float] | str) -> tuple[float, ...]:
    try:
        parts = given.split(",") if isinstance(given, str) else given
        numbers = tuple(dict.fromkeys(float(part) for part in parts))
    except (TypeError, ValueError):
        numbers = ()
    # A NaN fails the comparison.
    if not numbers or not all(0.0 <= number < math.inf for number in numbers):
        raise ConfigError(f"temperatures must be numbers such as 0,0.7,1, got {shown(given)}")
    return numbers
