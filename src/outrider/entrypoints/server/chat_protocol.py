"""What the body of a chat may hold: messages, tools, and how the model is to use them."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from outrider.entrypoints.server import limits
from outrider.entrypoints.server.errors import invalid
from outrider.entrypoints.server.field_errors import refuse_unsupported
from outrider.entrypoints.server.protocol import (
    GenerationBody,
    Name,
    NotNegative,
    Positive,
    RequestBody,
)
from outrider.errors import shown


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _check_parameters(value: dict[str, Any]) -> dict[str, Any]:
    properties = value.get("properties", {})
    if value.get("type", "object") != "object" or not isinstance(properties, dict):
        raise PydanticCustomError("parameters", "must be the JSON schema of an object")
    return value


class _Part(BaseModel):
    """A part of a body."""

    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(_Part):
    """A part of a message; there are none but texts."""

    type: Literal["text"]
    text: str


_Parts = Annotated[list[TextPart], Field(max_length=limits.MAX_CONTENT_PARTS)]


class CalledFunction(_Part):
    """What was called, and the arguments as JSON, or what the model has written in its place."""

    name: Name
    arguments: str


class ToolCall(_Part):
    """A call in a message of the assistant's."""

    id: Name
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Part):
    """A message of a chat."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": (),
    }
    # An assistant that calls functions need not say anything.
    model_config = ConfigDict(json_schema_extra={"required": ["role"]})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        _Parts, BeforeValidator(_as_parts, json_schema_input_type=str | _Parts | None)
    ]
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=limits.MAX_TOOL_CALLS)] | None = None
    # Two names of one thing: the first is vLLM's, the second DeepSeek's and that of templates.
    reasoning: str | None = None
    reasoning_content: str | None = None


class Function(_Part):
    """What the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] | None = None
    strict: bool | None = None


class Tool(_Part):
    """A function, as OpenAI wraps it."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Part):
    """The one function to call."""

    name: Name


class NamedToolChoice(_Part):
    """That a certain function is to be called."""

    type: Literal["function"]
    function: NamedFunction


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)]
TemplateKwargs = Annotated[dict[Name, Any], Field(max_length=limits.MAX_TEMPLATE_KWARGS)]


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationBody.UNSUPPORTED,
        "add_generation_prompt": (True,),
        # The template has put in what belongs around a chat.
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "media_io_kwargs": (),
        "mm_processor_kwargs": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "thinking_token_budget": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Messages
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NotNegative | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template_kwargs: TemplateKwargs | None = None

    @classmethod
    def prepare(cls, body: dict[str, Any]) -> None:
        """Takes out of messages what asks for nothing."""
        _prepare_messages(body)

    @property
    def told_tools(self) -> list[Tool]:
        """Tools that the model is told of: none where it may not call any."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def requires_call(self) -> bool:
        """Whether the model has to call a function, whatever it would do."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)

    def check(self) -> None:
        """Refuse what contradicts itself."""
        self.check_stream()
        limits_given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits_given) > 1:
            raise invalid(
                "max_completion_tokens",
                "max_tokens and max_completion_tokens are the same: give one of the two",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs true")
        if self.return_tokens_as_token_ids and not self.logprobs:
            raise invalid(
                "return_tokens_as_token_ids", "return_tokens_as_token_ids needs logprobs true"
            )
        if self.parallel_tool_calls is not None and not self.tools:
            raise invalid("parallel_tool_calls", "parallel_tool_calls needs tools")
        check_messages(self.messages)
        check_tools(self.tools or [])
        _json_length("chat_template_kwargs", self.chat_template_kwargs)
        self._check_tool_choice()

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        names = [tool.function.name for tool in self.tools or []]
        if choice in (None, "none"):
            return
        if not names:
            raise invalid("tool_choice", f"tool_choice {_said(choice)} needs tools")
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise invalid(
                "tool_choice",
                f"tool_choice names {shown(choice.function.name)}, which is none of the tools",
            )


class TokenizeBody(RequestBody):
    """The body of /tokenize: a prompt, or messages as the model would read them."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "add_generation_prompt": (True,),
        "chat_template": (),
        "continue_final_message": (False,),
    }

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @classmethod
    def prepare(cls, body: dict[str, Any]) -> None:
        """Takes out of messages what asks for nothing."""
        _prepare_messages(body)

    def check(self) -> None:
        """Refuse what contradicts itself."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) and self.messages is None:
                raise invalid(name, f"{name} needs messages")
        if self.add_special_tokens and self.messages is not None:
            raise invalid("add_special_tokens", "add_special_tokens true does not go with messages")
        check_messages(self.messages or [])
        check_tools(self.tools or [])
        _json_length("chat_template_kwargs", self.chat_template_kwargs)


def check_tools(tools: list[Tool]) -> None:
    """Refuses tools that are too large, and names that several have."""
    places: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = tool.function.name
        if places.setdefault(name, index) != index:
            raise invalid(
                f"tools[{index}].function.name",
                f"tools[{index}].function.name {shown(name)} is that of tools[{places[name]}] too",
            )
        size = _json_length(f"tools[{index}]", tool.model_dump())
        if size > limits.MAX_TOOL_LENGTH:
            raise invalid(
                f"tools[{index}]",
                f"tools[{index}] has {size:,} characters of JSON: {limits.MAX_TOOL_LENGTH:,} is "
                "the limit",
            )


def _json_length(param: str, value: object) -> int:
    """Characters of a value as JSON, which knows no NaN."""
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError:
        raise invalid(param, f"{param} holds a number that is not finite") from None


def check_messages(messages: list[ChatMessage]) -> None:
    """Refuses fields of a message that do not go with its role, and answers that no call has."""
    functions: dict[str, str] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_role(where, message)
        if message.role == "tool":
            _check_answer(where, message, functions)
        ids = [call.id for call in message.tool_calls or []]
        for number, one in enumerate(ids):
            if ids.index(one) != number:
                param = f"{where}.tool_calls[{number}].id"
                raise invalid(param, f"{param} {shown(one)} is that of another call")
        functions |= {call.id: call.function.name for call in message.tool_calls or []}


def _check_role(where: str, message: ChatMessage) -> None:
    roles = {
        "tool_call_id": "tool",
        "tool_calls": "assistant",
        "reasoning": "assistant",
        "reasoning_content": "assistant",
    }
    for name, role in roles.items():
        if getattr(message, name) not in (None, []) and message.role != role:
            raise invalid(
                f"{where}.{name}", f"{where}.{name} is for the role {role}, got {message.role}"
            )
    if None not in (message.reasoning, message.reasoning_content) and (
        message.reasoning != message.reasoning_content
    ):
        raise invalid(
            f"{where}.reasoning_content",
            f"{where}.reasoning and {where}.reasoning_content are the same: give one of the two",
        )


def _check_answer(where: str, message: ChatMessage, functions: dict[str, str]) -> None:
    """An answer belongs to a call before it, and so does the name of its function."""
    if message.tool_call_id is None:
        raise invalid(
            f"{where}.tool_call_id",
            f"{where}.tool_call_id is missing",
            code="missing_required_parameter",
        )
    if message.tool_call_id not in functions:
        raise invalid(
            f"{where}.tool_call_id",
            f"{where}.tool_call_id {shown(message.tool_call_id)} is that of no call in the "
            "messages before it",
        )
    called = functions[message.tool_call_id]
    if message.name not in (None, called):
        raise invalid(
            f"{where}.name", f"{where}.name is {shown(message.name)}, but {called!r} was called"
        )


def _prepare_messages(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_message(f"messages[{i}].", one) for i, one in enumerate(messages)]


def _message(where: str, message: object) -> object:
    """A message without the fields that ask for nothing; an assistant's content may be null."""
    if not isinstance(message, dict):
        return message
    refuse_unsupported(where, message, ChatMessage.UNSUPPORTED)
    kept = {name: value for name, value in message.items() if name not in ChatMessage.UNSUPPORTED}
    is_called = bool(kept.get("tool_calls"))
    if kept.get("role") == "assistant" and kept.get("content", None if is_called else "") is None:
        kept["content"] = ""
    return kept


def _said(choice: object) -> str:
    return "of one function" if isinstance(choice, NamedToolChoice) else f'"{choice}"'
