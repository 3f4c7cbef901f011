"""From the fields of a body to `SamplingParams`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.entrypoints.server.errors import from_request_error, invalid
from outrider.errors import RequestError
from outrider.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.entrypoints.server.chat_protocol import ChatBody
    from outrider.entrypoints.server.protocol import CompletionBody, GenerationBody

# Fields that a body and SamplingParams have under one name.
_SAME_NAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "num_speculative_tokens",
    "rejection_sample_method",
)
# Of OpenAI's API; the default of a chat is what the model's length leaves.
DEFAULT_COMPLETION_TOKENS = 16


class ParamsBuilder:
    """Makes the parameters of requests.

    Args:
        defaults: of the checkpoint, for what a body leaves open.
        max_new_tokens: the checkpoint's default of the output's length; None where it names none.
        max_logprobs: the most log probabilities of a position; -1 is the whole vocabulary.
    """

    def __init__(
        self, defaults: SamplingParams, max_new_tokens: int | None, max_logprobs: int
    ) -> None:
        self._defaults = defaults
        self._max_new_tokens = max_new_tokens
        self._max_logprobs = max_logprobs

    def of_completion(self, body: CompletionBody) -> SamplingParams:
        """Parameters of a completion; with max_tokens 0 one token runs that nobody is shown."""
        self._check_logprobs("logprobs", body.logprobs)
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
        max_tokens = body.max_tokens
        if max_tokens is None:
            max_tokens = self._max_new_tokens or DEFAULT_COMPLETION_TOKENS
        values = {
            "max_tokens": max_tokens or 1,
            "logprobs": body.logprobs if max_tokens else None,
            "prompt_logprobs": prompt_logprobs,
        }
        return self._build(body, values, {})

    def of_chat(self, body: ChatBody) -> SamplingParams:
        """Parameters of a chat completion."""
        self._check_logprobs("top_logprobs", body.top_logprobs)
        max_tokens = body.max_completion_tokens or body.max_tokens or self._max_new_tokens
        names = {"logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        values = {
            "max_tokens": max_tokens,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "prompt_logprobs": body.prompt_logprobs,
        }
        return self._build(body, values, names)

    def _build(
        self, body: GenerationBody, values: dict[str, Any], names: Mapping[str, str]
    ) -> SamplingParams:
        self._check_logprobs("prompt_logprobs", body.prompt_logprobs)
        given = {name: getattr(body, name) for name in _SAME_NAME}
        given = {name: value for name, value in given.items() if value is not None}
        try:
            return replace(self._defaults, output_kind=RequestOutputKind.DELTA, **values, **given)
        except RequestError as error:
            raise from_request_error(error, type(body).model_fields, names) from None

    def _check_logprobs(self, name: str, value: int | None) -> None:
        if value is not None and 0 <= self._max_logprobs < value:
            raise invalid(
                name, f"{name} must be at most {self._max_logprobs} (--max-logprobs), got {value}"
            )
