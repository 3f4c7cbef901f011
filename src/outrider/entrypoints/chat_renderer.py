"""Conversations, checked and turned into prompts with the checkpoint's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

from outrider.chat_template import ChatOptions, ChatTemplate
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.errors import RequestError, shown

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.tokenizer import Tokenizer

    Message = Mapping[str, Any]
    Conversation = Sequence[Message]

# What a message of the model may hold in the place of content.
_INSTEAD_OF_CONTENT = ("tool_calls", "reasoning_content", "reasoning")


class ChatRenderer:
    """Turns messages, as the OpenAI API writes them, into prompts.

    Args:
        tokenizer: of the checkpoint.
        model_dir: where its chat template is looked for, when first asked for.
    """

    def __init__(self, tokenizer: Tokenizer, model_dir: str | Path) -> None:
        self._tokenizer = tokenizer
        self._model_dir = model_dir

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate.from_pretrained(self._model_dir)

    def variables(self, options: ChatOptions) -> frozenset[str]:
        """Names of the variables that `template_kwargs` may set."""
        return self._chat_template.variables(options)

    def encode(self, messages: object, options: ChatOptions) -> list[EncodedPrompt]:
        """Prompts of one conversation, a list of messages, or of a list of conversations."""
        if not _is_list(messages):
            raise RequestError(f"messages must be a list of messages, got {shown(messages)}")
        if not messages or any(isinstance(message, Mapping) for message in messages):
            return [self.encode_one(messages, options)]
        return [
            self.encode_one(conversation, options, f"messages[{index}]")
            for index, conversation in enumerate(messages)
        ]

    def encode_one(
        self, messages: object, options: ChatOptions, name: str = "messages"
    ) -> EncodedPrompt:
        """The prompt of one conversation.

        Args:
            messages: objects with role and content, at least one.
            options: how it is told.
            name: how an error names the conversation.
        """
        if not _is_list(messages):
            raise RequestError(f"{name} must be a list of messages, got {shown(messages)}")
        if not messages:
            raise RequestError(f"{name} is empty: at least one message is needed")
        tools = options.tools
        if tools is not None and not (
            _is_list(tools) and all(isinstance(t, Mapping) for t in tools)
        ):
            raise RequestError(f"tools must be a list of JSON schemas, got {shown(tools)}")
        checked = [_checked(f"{name}[{index}]", one) for index, one in enumerate(messages)]
        text = self._chat_template.render(checked, options)
        # The template writes out the special tokens that belong there.
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return EncodedPrompt(token_ids, text, name)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _checked(name: str, message: object) -> dict[str, Any]:
    """A message whose content is a text, and whose tool calls hold objects."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{name} must be an object with role and content, got {shown(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}.role must be a text such as user, got {shown(role)}")
    checked = dict(message)
    if content is not None:
        checked["content"] = _text(f"{name}.content", content)
    elif role != "assistant" or not any(message.get(key) for key in _INSTEAD_OF_CONTENT):
        raise RequestError(f"{name}.content is missing")
    if message.get("tool_calls") is not None:
        checked["tool_calls"] = _tool_calls(f"{name}.tool_calls", message["tool_calls"])
    return checked


def _text(name: str, content: object) -> str:
    """A content, of which parts become one text with line breaks between them, as in vLLM."""
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise RequestError(f"{name} must be a text or a list of parts, got {shown(content)}")
    texts = []
    for index, part in enumerate(content):
        text = part
        if isinstance(part, Mapping):
            if part.get("type", "text") != "text":
                raise RequestError(
                    f"{name}[{index}]: only parts of the type text are supported, got "
                    f"{shown(part['type'])}"
                )
            text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(
                f'{name}[{index}] must be a part such as {{"type": "text", "text": "Hi"}}, got '
                f"{shown(part)}"
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(name: str, calls: object) -> list[dict[str, Any]]:
    """Calls whose arguments are objects: the API has them as JSON text, templates want to loop."""
    if not _is_list(calls):
        raise RequestError(f"{name} must be a list of calls, got {shown(calls)}")
    parsed = []
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise RequestError(f"{name}[{index}] must be an object, got {shown(call)}")
        call = dict(call)
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            arguments = _object_or_text(function["arguments"])
            call["function"] = {**function, "arguments": arguments}
        parsed.append(call)
    return parsed


def _object_or_text(arguments: str) -> object:
    """The object that a JSON text holds; a model may have written something else."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
