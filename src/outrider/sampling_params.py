"""What one request asks of the sampler, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from outrider.config import (
    MAX_SEED,
    MAX_SPECULATIVE_TOKENS,
    MIN_SEED,
    REJECTION_SAMPLE_METHODS,
    RejectionSampleMethod,
)
from outrider.errors import RequestError, shown

# Below it the distribution is one-hot but for near-ties, and dividing by it overflows.
_LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request.

    Attributes:
        temperature: 0 is greedy, and so is anything below 1e-5, which is stored as 0.
        top_p: least probability mass of the likeliest tokens to sample from, in (0, 1].
        top_k: how many of the likeliest tokens to sample from; 0 or -1 is all.
        min_p: least probability relative to the likeliest token, in [0, 1].
        max_tokens: output tokens at most; None is as many as max_model_len leaves.
        seed: makes the request reproducible; None (or -1) draws entropy.
        ignore_eos: go on after the end-of-sequence token.
        stop_token_ids: further ids that end the output.
        num_speculative_tokens: drafts per step, up to the engine's number; None is that number.
        rejection_sample_method: the rule; None is the engine's.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    num_speculative_tokens: int | None = None
    rejection_sample_method: RejectionSampleMethod | None = None

    def __post_init__(self) -> None:
        """Check each parameter; a number of numpy's becomes one of Python's."""
        temperature = _real("temperature", self.temperature, 0, math.inf)
        self._set("temperature", temperature if temperature >= _LEAST_TEMPERATURE else 0.0)
        self._set("top_p", _real("top_p", self.top_p, 0, 1, is_zero_out=True))
        self._set("top_k", _integer("top_k", self.top_k, -1, hint=" (0 or -1 is all)"))
        self._set("min_p", _real("min_p", self.min_p, 0, 1))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        if self.seed is not None:
            seed = _integer("seed", self.seed, MIN_SEED, MAX_SEED)
            self._set("seed", None if seed == -1 else seed)
        if type(self.ignore_eos) is not bool:
            raise RequestError(f"ignore_eos must be true or false, got {shown(self.ignore_eos)}")
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.num_speculative_tokens is not None:
            number = _integer(
                "num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS
            )
            self._set("num_speculative_tokens", number)
        method = self.rejection_sample_method
        if method is not None and method not in REJECTION_SAMPLE_METHODS:
            raise RequestError(
                f"rejection_sample_method must be standard, block or coupled, got {shown(method)}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.temperature == 0

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _real(
    name: str, value: object, least: float, most: float, *, is_zero_out: bool = False
) -> float:
    number = _as_float(value)
    # A NaN fails every comparison.
    if not (least <= number <= most) or math.isinf(number) or (is_zero_out and not number):
        interval = f"a number in {'(' if is_zero_out else '['}{least}, {most}]"
        allowed = f"a finite number, {least} or more" if most == math.inf else interval
        raise RequestError(f"{name} must be {allowed}, got {shown(value)}")
    return number


def _as_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(name: str, value: object, least: int, most: int | None = None, hint: str = "") -> int:
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = int(value)
        if least <= number and (most is None or number <= most):
            return number
    allowed = f"{least} or more" if most is None else f"from {least} to {most}"
    raise RequestError(f"{name} must be an integer {allowed}{hint}, got {shown(value)}")


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"{name} must be a list of token ids, got {shown(value)}")
    return tuple(_integer(f"{name}[{i}]", token_id, 0) for i, token_id in enumerate(value))
