"""How a server reads what its model writes, as its options and each request say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.entrypoints.server.errors import invalid
from outrider.entrypoints.server.message_parser import MessageFormat
from outrider.entrypoints.server.output_grammars import holds_chosen_calls
from outrider.entrypoints.server.qwen_markup import CALL_END, CALL_START, THINK_END
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.config import ServerConfig
    from outrider.entrypoints.server.chat_protocol import ChatBody
    from outrider.tokenizer import Tokenizer


class MessageFormats:
    """Makes the format of each chat.

    Args:
        config: names the parsers.
        tokenizer: of the checkpoint.

    Raises:
        ConfigError: tags that a parser looks for never show in the text of an output.
    """

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        for name, tags in (
            ("reasoning_parser", (THINK_END,)),
            ("tool_call_parser", (CALL_START, CALL_END)),
        ):
            parser = getattr(config, name)
            for tag in tags if parser is not None else ():
                token_ids = tokenizer.encode(tag, add_special_tokens=False)
                if tokenizer.decode(token_ids) != tag:
                    raise ConfigError(
                        f"{name} {parser}: {tag} is a special token of this checkpoint, which the "
                        "text of an output leaves out"
                    )

    def check(self, body: ChatBody) -> None:
        """Refuses what the server has no parser for."""
        if body.include_reasoning is False and self._config.reasoning_parser is None:
            raise invalid(
                "include_reasoning",
                "include_reasoning false needs a server that was started with --reasoning-parser",
            )
        if body.requires_call and self._config.tool_call_parser is None:
            raise invalid("tool_choice", "tool_choice requires --tool-call-parser to be set")
        if body.told_tools and not (body.requires_call or self._config.calls_tools):
            # vLLM's words, which clients look for.
            raise invalid(
                "tools" if body.tool_choice is None else "tool_choice",
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to '
                "be set",
            )

    def of(self, body: ChatBody, prompt: str) -> MessageFormat:
        """How the outputs of a chat are read.

        Args:
            body: of the request.
            prompt: text that the chat template made of it.
        """
        tools = body.told_tools
        return MessageFormat(
            prompt=prompt,
            reasoning_parser=self._config.reasoning_parser,
            tool_call_parser=self._config.tool_call_parser if tools else None,
            parameters={tool.function.name: tool.function.parameters or {} for tool in tools},
            max_calls=1 if body.parallel_tool_calls is False else None,
            calls_are_held=holds_chosen_calls(body),
        )
