"""What answers hold, for /openapi.json: they are written by hand, and tests hold them to this."""

from __future__ import annotations

from typing import Literal, NotRequired

# That of Python 3.11 is not enough for pydantic.
from typing_extensions import TypedDict


class ErrorDetails(TypedDict):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """What is answered instead of a result; in a stream, its last event."""

    error: ErrorDetails


class PromptTokensDetails(TypedDict):
    """Of the tokens of prompts, those that did not have to run."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Of the tokens that were emitted, those of thoughts."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of prompts, each once, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class DraftingStats(TypedDict):
    """What drafting brought to all choices."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    mean_acceptance_length: float
    acceptance_rate: float
    tokens_per_target_pass: float


class Pass(TypedDict):
    """A pass of the model, and what it emitted."""

    num_draft_tokens: int
    token_ids: list[int]
    token_sources: list[str]
    token_texts: list[str]


class PromptLogprob(TypedDict):
    """One token that might stand at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class _Choice(TypedDict):
    """What choices of both APIs have in common."""

    index: int
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    decode_steps: NotRequired[list[Pass]]


class _Answer(TypedDict):
    """What answers of both APIs have in common."""

    id: str
    created: int
    model: str
    spec_decode_stats: NotRequired[DraftingStats]


class CompletionLogprobs(TypedDict):
    """Log probabilities of the tokens of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _CompletionText(_Choice):
    """A text, or a part of one."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int] | None]


class CompletionChoice(_CompletionText):
    """A completion."""

    finish_reason: Literal["stop", "length"]
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionChunkChoice(_CompletionText):
    """A part of a completion."""

    finish_reason: Literal["stop", "length"] | None


class Completion(_Answer):
    """Completions of all prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Answer):
    """An event of streamed completions; the last has no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


class TokenLogprob(TypedDict):
    """A token of a message."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token that was chosen, and the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log probabilities of the tokens of a message."""

    content: list[ChosenLogprob]
    refusal: None


class Called(TypedDict):
    """The function of a call, and the JSON text of its arguments."""

    name: str
    arguments: str


class Call(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: Called


class CalledPart(TypedDict):
    """A part of a call: its first names the function."""

    name: NotRequired[str]
    arguments: str


class CallPart(TypedDict):
    """A part of the call that has this index."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledPart


class Message(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[Call]]


class MessagePart(TypedDict):
    """What goes on a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallPart]]


class ChatChoice(_Choice):
    """A message, and how it ended."""

    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatChunkChoice(TypedDict):
    """A part of a message."""

    index: int
    delta: MessagePart
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    decode_steps: NotRequired[list[Pass]]


class ChatCompletion(_Answer):
    """Messages of all choices."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class ChatCompletionChunk(_Answer):
    """An event of a streamed chat; the last has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class Tokenization(TypedDict):
    """Token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenization(TypedDict):
    """Text of token ids."""

    prompt: str


class ModelCard(TypedDict):
    """A name of the model, and what it can."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    num_speculative_tokens: int


class ModelList(TypedDict):
    """The names of the model."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    """That requests are taken."""

    status: Literal["ok"]


class Version(TypedDict):
    """The version of the server."""

    version: str
