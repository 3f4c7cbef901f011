"""Prompts of a body as token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.chat_template import ChatOptions
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.entrypoints.server.errors import invalid
from outrider.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from outrider.entrypoints.chat_renderer import ChatRenderer
    from outrider.entrypoints.server.chat_protocol import ChatMessage, Tool
    from outrider.entrypoints.server.protocol import Prompt
    from outrider.tokenizer import Tokenizer

# Characters; a longer text is encoded in a thread, where the tokenizer lets others run.
_MAX_INLINE_LENGTH = 4096


@dataclass(frozen=True)
class PromptReader:
    """Encodes what clients send.

    Attributes:
        tokenizer: of the checkpoint.
        chat_renderer: of the checkpoint.
        model_dir: where the checkpoint lies.
        default_chat_template_kwargs: variables of the chat template for chats that do not set them.
    """

    tokenizer: Tokenizer
    chat_renderer: ChatRenderer
    model_dir: Path
    default_chat_template_kwargs: Mapping[str, Any]

    async def of_completion(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        """Prompts in their order; where there are several, each knows its name."""
        encoded = []
        num_before = 0
        for index, prompt in enumerate(prompts):
            name = f"prompt[{index}]" if len(prompts) > 1 else ""
            if isinstance(prompt, str):
                token_ids = await self.encode(prompt, name or "prompt", num_before)
                num_before += len(prompt)
                encoded.append(EncodedPrompt(token_ids, prompt, name))
            else:
                encoded.append(EncodedPrompt(prompt, None, name))
        return encoded

    async def of_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> EncodedPrompt:
        """The one prompt that a chat is, up to where the assistant speaks.

        Args:
            messages: of the chat.
            tools: that the model may call.
            template_kwargs: variables of the chat template.
            reasoning_effort: how much the model is to think, "none" or more.
        """
        told = [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools
        ]
        options = ChatOptions(tools=told or None, add_generation_prompt=True)
        given = list(map(_told, messages))
        try:
            # A template is a program of the checkpoint's and may take its time.
            return await asyncio.to_thread(
                self._encode_chat, given, options, template_kwargs or {}, reasoning_effort
            )
        except RequestError as error:
            # Where the checkpoint lies is nothing to a client.
            message = str(error).replace(str(self.model_dir), "the checkpoint")
            raise invalid("messages", message) from None

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        template_kwargs: Mapping[str, Any],
        reasoning_effort: str | None,
    ) -> EncodedPrompt:
        defaults = self.default_chat_template_kwargs
        if defaults or template_kwargs or reasoning_effort is not None:
            known = self.chat_renderer.variables(options)
            for name in template_kwargs:
                if name not in known:
                    raise invalid(
                        f"chat_template_kwargs.{name}",
                        f"chat_template_kwargs.{name}: the chat template reads no such variable; "
                        f"those that it reads: {', '.join(sorted(known)) or 'none'}",
                    )
            thinking = _thinking(reasoning_effort, known)
            # Of several templates one may read what this does not.
            told = {name: value for name, value in defaults.items() if name in known}
            options = replace(options, template_kwargs={**told, **thinking, **template_kwargs})
        return self.chat_renderer.encode_one(messages, options)

    async def encode(
        self,
        text: str,
        name: str,
        num_before: int = 0,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any.
            name: of its field.
            num_before: characters of the request's texts before it; what is short together is
                encoded here and now.
            add_special_tokens: put around it what the tokenizer puts around every text.
        """
        try:
            if num_before + len(text) <= _MAX_INLINE_LENGTH:
                return self.tokenizer.encode(text, add_special_tokens)
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)
        except RequestError as error:
            raise invalid(name, f"{name}: {error}") from None


def _told(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates read it."""
    told = message.model_dump(exclude_none=True)
    # What OpenAI calls developer is what models are trained on as system.
    told["role"] = "system" if message.role == "developer" else message.role
    reasoning = message.reasoning or message.reasoning_content
    for name in ("reasoning", "reasoning_content"):
        told.pop(name, None)
        if reasoning:
            told[name] = reasoning
    for call in told.get("tool_calls", ()):
        call["function"]["arguments"] = call["function"]["arguments"] or "{}"
    return told


def _thinking(effort: str | None, known: Collection[str]) -> dict[str, Any]:
    """Variables that tell a template how much the model is to think, as vLLM sets them."""
    if effort is None:
        return {}
    values = {"enable_thinking": effort != "none", "reasoning_effort": effort}
    told = {name: value for name, value in values.items() if name in known}
    if not told and effort != "none":
        raise invalid(
            "reasoning_effort",
            f"reasoning_effort {effort!r} is not supported: the chat template knows no thinking",
        )
    return told
