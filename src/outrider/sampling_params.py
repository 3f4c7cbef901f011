"""What one request asks of the sampler, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real

from outrider.config import (
    MAX_SEED,
    MAX_SPECULATIVE_TOKENS,
    MIN_SEED,
    REJECTION_SAMPLE_METHODS,
    RejectionSampleMethod,
)
from outrider.errors import RequestError, check_unicode, shown
from outrider.structured_outputs import StructuredOutputsParams

# Below it the distribution is one-hot but for near-ties, and dividing by it overflows.
_LEAST_TEMPERATURE = 1e-5
# What the OpenAI API allows.
_MAX_PENALTY = 2.0
_MAX_LOGIT_BIAS = 100.0
# As in vLLM, so that no typing error queues a billion requests.
_MAX_COMPLETIONS = 16384


class RequestOutputKind(StrEnum):
    """What each output of a streamed request holds.

    CUMULATIVE: all that has been emitted so far.
    DELTA: what is new.
    FINAL_ONLY: one output, when the request has ended.
    """

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request.

    Attributes:
        n: completions of the prompt, at most 16384.
        presence_penalty: taken from the logit of a token that the output holds, in [-2, 2].
        frequency_penalty: taken once for each time that the output holds it, in [-2, 2].
        repetition_penalty: above 1 it divides the positive logit of a token that prompt or output
            holds, and multiplies a negative one; greater than 0.
        temperature: 0 is greedy, and so is anything below 1e-5, which is stored as 0.
        top_p: least probability mass of the likeliest tokens to sample from, in (0, 1].
        top_k: how many of the likeliest tokens to sample from; 0 or -1 is all.
        min_p: least probability relative to the likeliest token, in [0, 1].
        seed: makes the request reproducible; None, and -1 as well, draws entropy.
        stop: texts that end the output.
        stop_token_ids: further ids that end the output.
        bad_words: texts whose tokens are never emitted one after the other.
        include_stop_str_in_output: keep in the text what ended it.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: output tokens at most; None is as many as max_model_len leaves.
        min_tokens: output tokens before anything may end the output.
        logprobs: of each output token, report its log probability and the likeliest ones, so many;
            -1 is the whole vocabulary; None is no report.
        prompt_logprobs: the same of each prompt token but the first.
        logit_bias: added to the logits of token ids, in [-100, 100].
        detokenize: turn the output into text; without it nothing but token ids comes out.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what each output of a streamed request holds.
        num_speculative_tokens: drafts per step, up to the engine's number; None is that number.
        rejection_sample_method: the rule; None is the engine's.
        structured_outputs: what the text must be; None is anything.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | str | None = ()
    stop_token_ids: Sequence[int] | None = ()
    bad_words: Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    num_speculative_tokens: int | None = None
    rejection_sample_method: RejectionSampleMethod | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Check each parameter; a number of numpy's becomes one of Python's."""
        temperature = _real("temperature", self.temperature, 0, math.inf)
        self._set("temperature", temperature if temperature >= _LEAST_TEMPERATURE else 0.0)
        self._set("top_p", _real("top_p", self.top_p, 0, 1, is_zero_out=True))
        self._set("top_k", _integer("top_k", self.top_k, -1, hint=" (0 or -1 is all)"))
        self._set("min_p", _real("min_p", self.min_p, 0, 1))
        self._set("n", _integer("n", self.n, 1, _MAX_COMPLETIONS))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _real(name, getattr(self, name), -_MAX_PENALTY, _MAX_PENALTY))
        penalty = self.repetition_penalty
        self._set(
            "repetition_penalty",
            _real("repetition_penalty", penalty, 0, math.inf, is_zero_out=True),
        )
        self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.seed is not None:
            seed = _integer("seed", self.seed, MIN_SEED, MAX_SEED)
            self._set("seed", None if seed == -1 else seed)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
        ):
            if type(getattr(self, name)) is not bool:
                raise RequestError(
                    f"{name} must be true or false, got {shown(getattr(self, name))}"
                )
        self._check_ends()
        self._check_output()
        self._check_drafting()
        self._check_structured_outputs()

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.temperature == 0

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must not be more than max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("stop", _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._set("bad_words", _texts("bad_words", self.bad_words))
        if self.stop and not self.detokenize:
            raise RequestError("stop needs the text of the output: leave detokenize on")

    def _check_output(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                self._set(name, _integer(name, value, -1, hint=" (-1 is the whole vocabulary)"))
        try:
            self._set("output_kind", RequestOutputKind(self.output_kind))
        except ValueError:
            raise RequestError(
                "output_kind must be cumulative, delta or final_only, got "
                f"{shown(self.output_kind)}"
            ) from None

    def _check_drafting(self) -> None:
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

    def _check_structured_outputs(self) -> None:
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, got {shown(wanted)}"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _real(
    name: str, value: object, least: float, most: float, *, is_zero_out: bool = False
) -> float:
    number = _as_float(value)
    # A NaN fails every comparison.
    if not (least <= number <= most) or math.isinf(number) or (is_zero_out and not number):
        interval = f"a number in {'(' if is_zero_out else '['}{least:g}, {most:g}]"
        bound = f"greater than {least:g}" if is_zero_out else f"{least:g} or more"
        allowed = f"a finite number, {bound}" if most == math.inf else interval
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
    is_integer = not isinstance(value, bool) and isinstance(value, Integral)
    number = int(value) if is_integer else least - 1  # type: ignore[call-overload]
    if least <= number <= (MAX_SEED if most is None else most):
        return number
    if most is None and number > MAX_SEED:
        most = MAX_SEED
    allowed = f"{least} or more" if most is None else f"from {least} to {most}"
    raise RequestError(f"{name} must be an integer {allowed}{hint}, got {shown(value)}")


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"{name} must be a list of token ids, got {shown(value)}")
    return tuple(_integer(f"{name}[{i}]", token_id, 0) for i, token_id in enumerate(value))


def _texts(name: str, value: object) -> tuple[str, ...]:
    """Texts, none of them empty: an empty one would be found everywhere."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"{name} must be a list of texts, got {shown(value)}")
    for index, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"{name}[{index}] must be a text of one character or more, got {shown(text)}"
            )
        check_unicode(f"{name}[{index}]", text)
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float] | None:
    """Biases by token id; JSON has no integer keys, so an id may be given as its digits."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(
            f"logit_bias must map token ids to numbers in [-100, 100], got {shown(value)}"
        )
    biases = {}
    for key, bias in value.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 18
        token_id = _integer("a token id in logit_bias", int(key) if is_digits else key, 0)
        if token_id in biases:
            raise RequestError(f"logit_bias gives token id {token_id} twice")
        name = f"logit_bias[{token_id}]"
        biases[token_id] = _real(name, bias, -_MAX_LOGIT_BIAS, _MAX_LOGIT_BIAS)
    return biases
