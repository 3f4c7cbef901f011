"""Prompts of a body as token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.chat_template import ChatOptions
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.entrypoints.server.errors import invalid
from outrider.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outrider.entrypoints.chat_renderer import ChatRenderer
    from outrider.entrypoints.server.protocol import ChatMessage, Prompt
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
    """

    tokenizer: Tokenizer
    chat_renderer: ChatRenderer
    model_dir: Path

    async def of_completion(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        """Prompts in their order; where there are several, each knows its name."""
        encoded = []
        for index, prompt in enumerate(prompts):
            name = f"prompt[{index}]" if len(prompts) > 1 else ""
            if isinstance(prompt, str):
                token_ids = await self.encode(prompt, name or "prompt")
                encoded.append(EncodedPrompt(token_ids, prompt, name))
            else:
                encoded.append(EncodedPrompt(prompt, None, name))
        return encoded

    async def of_chat(self, messages: Sequence[ChatMessage]) -> EncodedPrompt:
        """The one prompt that a chat is, up to where the assistant speaks."""
        given = [
            # What OpenAI calls developer is what models are trained on as system.
            {
                "role": "system" if one.role == "developer" else one.role,
                "content": [part.model_dump() for part in one.content],
            }
            for one in messages
        ]
        try:
            # A template is a program of the checkpoint's and may take its time.
            return await asyncio.to_thread(
                self.chat_renderer.encode_one, given, ChatOptions(add_generation_prompt=True)
            )
        except RequestError as error:
            # Where the checkpoint lies is nothing to a client.
            message = str(error).replace(str(self.model_dir), "the checkpoint")
            raise invalid("messages", message) from None

    async def encode(self, text: str, name: str) -> list[int]:
        """Token ids of a text.

        Args:
            text: any.
            name: of its field.
        """
        try:
            if len(text) <= _MAX_INLINE_LENGTH:
                return self.tokenizer.encode(text)
            return await asyncio.to_thread(self.tokenizer.encode, text)
        except RequestError as error:
            raise invalid(name, f"{name}: {error}") from None
