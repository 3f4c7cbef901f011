"""What a body may hold. A field that is unknown or has no effect here is an error that names it.

`RequestBody.parse` reads a body: fields of other servers first, so that the error says that they
are not supported; then the fields of the class, without converting any value.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from outrider.config import MAX_SEED, MAX_SPECULATIVE_TOKENS, MIN_SEED
from outrider.entrypoints.server import limits
from outrider.entrypoints.server.errors import invalid
from outrider.entrypoints.server.field_errors import first_error, refuse_unsupported
from outrider.entrypoints.server.structured_bodies import (  # noqa: TC001 - read by pydantic
    ResponseFormat,
    StructuredOutputs,
)

Prompt = str | list[int]

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": limits.MAX_PROMPTS}


def _parse_prompts(value: object) -> list[Prompt]:
    """One or several prompts, each a text or token ids, as a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(_is_id(one) for one in value):
            return [value]
        if len(value) > limits.MAX_PROMPTS:
            raise invalid("prompt", f"prompt has more than {limits.MAX_PROMPTS} entries")
        is_texts = all(isinstance(one, str) for one in value)
        if is_texts or all(_is_ids(one) for one in value):
            return value
    raise invalid(
        "prompt",
        "prompt must be a text, a list of token ids, or a list of texts or of lists of token ids; "
        "no list is empty, and no id negative",
    )


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _check_no(value: bool) -> bool:
    if value:
        raise PydanticCustomError("no", "must be false: this server does not do that")
    return value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Name = Annotated[str, Field(max_length=limits.MAX_NAME_LENGTH)]
# A switch of other servers that can only be off.
No = Annotated[bool, AfterValidator(_check_no), WithJsonSchema({"type": "boolean", "const": False})]
NotNegative = Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=limits.MAX_COUNT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
# JSON has no keys but texts.
_TokenId = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,18}$"})]
Biases = Annotated[
    dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=limits.MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}),
]
Prompts = Annotated[
    list[Prompt],
    PlainValidator(_parse_prompts),
    WithJsonSchema(
        {"anyOf": [_TEXT, _IDS, {**_SEVERAL, "items": _TEXT}, {**_SEVERAL, "items": _IDS}]}
    ),
]
_Stop = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
_Stops = Annotated[list[_Stop], Field(max_length=limits.MAX_STOPS)]
Stops = Annotated[_Stops, BeforeValidator(_as_list, json_schema_input_type=_Stop | _Stops)]
BadWord = Annotated[str, Field(min_length=1, max_length=limits.MAX_BAD_WORD_LENGTH)]
MetadataText = Annotated[str, Field(max_length=limits.MAX_METADATA_LENGTH)]


class RequestBody(BaseModel):
    """A body; `UNSUPPORTED` names fields of other servers, with the values that ask for nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {}

    model: Name | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Read a body.

        Raises:
            ApiError: the first field that is wrong.
        """
        refuse_unsupported("", body, cls.UNSUPPORTED)
        kept = {name: value for name, value in body.items() if name not in cls.UNSUPPORTED}
        cls.prepare(kept)
        try:
            return cls.model_validate(kept)
        except ValidationError as error:
            raise first_error(error, body, cls.model_fields) from None

    @classmethod
    def prepare(cls, body: dict[str, Any]) -> None:
        """Changes a body before its fields are read."""


class StreamOptions(BaseModel):
    """How a stream is written."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    # Of OpenAI and vLLM: what is false asks for nothing.
    include_obfuscation: No = False
    continuous_usage_stats: No = False


class GenerationBody(RequestBody):
    """Fields that completions and chat completions share."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "allowed_token_ids": (),
        "early_stopping": (False,),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "kv_transfer_params": (),
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "priority": (0,),
        "prompt_embeds": (),
        "request_id": (),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
    }

    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    max_tokens: NotNegative | None = None
    min_tokens: NotNegative | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: Biases | None = None
    stop: Stops | None = None
    stop_token_ids: (
        Annotated[list[NotNegative], Field(max_length=limits.MAX_STOP_TOKEN_IDS)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=limits.MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NotNegative | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)] | None = None
    rejection_sample_method: Literal["standard", "block", "coupled"] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_LENGTH)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_spec_decode_stats: bool | None = None
    return_decode_steps: bool | None = None

    # What clients of OpenAI send that changes no answer.
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: No | None = None
    metadata: (
        Annotated[dict[MetadataText, MetadataText], Field(max_length=limits.MAX_METADATA)] | None
    ) = None

    @property
    def skips_special_tokens(self) -> bool:
        """Whether the text is without special tokens, as it is where nothing is said."""
        return self.skip_special_tokens is not False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream(self) -> None:
        """Refuse what does not go with a stream, and what does not go without."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options needs stream true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "prompt_logprobs does not go with stream true")


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationBody.UNSUPPORTED,
        "add_special_tokens": (True,),
        "suffix": ("",),
    }

    prompt: Prompts
    echo: bool | None = None
    logprobs: NotNegative | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None

    def check(self) -> None:
        """Refuse what contradicts itself."""
        self.check_stream()
        if self.best_of not in (None, self.n or 1):
            raise invalid(
                "best_of",
                f"best_of must be n ({self.n or 1}) or left out: every completion is returned, "
                f"got {self.best_of}",
            )
        if self.return_tokens_as_token_ids and self.logprobs is None:
            raise invalid("return_tokens_as_token_ids", "return_tokens_as_token_ids needs logprobs")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "max_tokens 0 needs echo true")


class DetokenizeBody(RequestBody):
    """The body of /detokenize."""

    tokens: list[NotNegative]
