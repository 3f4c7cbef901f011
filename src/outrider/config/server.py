"""Options of the HTTP server, and the environment variable of its key."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from outrider.config.checks import check_bool, check_choice, check_int
from outrider.config.parsing import parse_size, take_known
from outrider.errors import ConfigError, shown

ReasoningParser = Literal["qwen3"]
ToolCallParser = Literal["qwen3_coder"]

API_KEY_VARIABLE = "OUTRIDER_API_KEY"
_LOOPBACK_NAMES = ("localhost", "ip6-localhost", "ip6-loopback")
# Of variables of the chat template, which has to copy them for each chat.
_MAX_DEPTH = 32
# A host name, or an address without its port.
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens, and what it lets in.

    Attributes:
        host: address to listen on; one that other machines reach needs an API key.
        port: to listen on; 0 takes a free one.
        served_model_name: what requests call the model, the first in answers; without one, the
            name of the checkpoint's folder.
        api_key: what a client must send as a bearer token; without it the environment variable
            OUTRIDER_API_KEY counts.
        allow_unauthenticated: listen where other machines reach, without an API key.
        allowed_host: further names that a request may call this server by, besides those of the
            loopback and the address it listens on; "*" is any.
        max_num_queued: completions that may wait for those that run; past it the answer is 429.
        max_body_size: bytes of a request's body at most.
        shutdown_timeout_s: seconds that running requests have after SIGTERM.
        reasoning_parser: how the model writes its thoughts, which then stand apart from what it
            says in a chat.
        tool_call_parser: how the model writes calls of the tools of a chat.
        enable_auto_tool_choice: let the model choose whether it calls a tool; needs
            tool_call_parser.
        default_chat_template_kwargs: variables of the chat template for chats that do not set
            them, such as {"enable_thinking": false}.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: str | None = None
    allow_unauthenticated: bool = False
    allowed_host: tuple[str, ...] = ()
    max_num_queued: int = 256
    max_body_size: int = 4 << 20
    shutdown_timeout_s: int = 30
    reasoning_parser: ReasoningParser | None = None
    tool_call_parser: ToolCallParser | None = None
    enable_auto_tool_choice: bool = False
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check each field, and that nobody can reach the server who should not."""
        if not _is_text(self.host) or not _HOST.fullmatch(self.host):
            raise ConfigError(f"host must be an address or a name, got {shown(self.host)}")
        check_int("port", self.port, 0, 65535)
        check_int("max_num_queued", self.max_num_queued, 0)
        check_int("max_body_size", self.max_body_size, 1)
        check_int("shutdown_timeout_s", self.shutdown_timeout_s, 0)
        check_bool("allow_unauthenticated", self.allow_unauthenticated)
        check_bool("enable_auto_tool_choice", self.enable_auto_tool_choice)
        if self.reasoning_parser is not None:
            check_choice("reasoning_parser", self.reasoning_parser, get_args(ReasoningParser))
        if self.tool_call_parser is not None:
            check_choice("tool_call_parser", self.tool_call_parser, get_args(ToolCallParser))
        elif self.enable_auto_tool_choice:
            raise ConfigError(
                "enable_auto_tool_choice needs a tool_call_parser, which may be "
                f"{', '.join(get_args(ToolCallParser))}"
            )
        for name in ("served_model_name", "allowed_host"):
            values = tuple(getattr(self, name))
            for value in values:
                if not _is_text(value):
                    raise ConfigError(f"{name} must be a name, got {shown(value)}")
            object.__setattr__(self, name, values)
        for value in self.allowed_host:
            if value != "*" and not _HOST.fullmatch(value):
                raise ConfigError(
                    f"allowed_host must be a name or an address without scheme and port, "
                    f"got {shown(value)}"
                )
        self._check_template_kwargs()
        self._check_api_key()

    @classmethod
    def from_kwargs(cls, **options: Any) -> ServerConfig:
        """Build it from flat options; the API key may come from the environment.

        `max_body_size` may be a text such as "4MiB".
        """
        take_known("", options, list(cls.__dataclass_fields__), {})
        size = options.get("max_body_size")
        if isinstance(size, str):
            options["max_body_size"] = parse_size("max_body_size", size)
        if options.get("api_key") is None:
            options["api_key"] = os.environ.get(API_KEY_VARIABLE)
        return cls(**options)

    def with_model_name(self, name: str) -> ServerConfig:
        """The same, in which the model has a name."""
        return self if self.served_model_name else replace(self, served_model_name=(name,))

    @property
    def calls_tools(self) -> bool:
        """Whether a model that chooses to call tools can."""
        return self.tool_call_parser is not None and self.enable_auto_tool_choice

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine reaches the address."""
        if self.host.lower() in _LOOPBACK_NAMES:
            return True
        address = _address(self.host)
        return address is not None and address.is_loopback

    def allows_host(self, name: str) -> bool:
        """Whether a request may call this server so, against DNS rebinding.

        Where every address of the machine is listened on, each of them may be called: a name that
        an attacker made point here is no address.

        Args:
            name: of the Host header, without the port and the brackets of an address.
        """
        allowed = {one.lower() for one in (self.host, *self.allowed_host)}
        if "*" in allowed or name.lower() in allowed or name.lower() in _LOOPBACK_NAMES:
            return True
        address, own = _address(name), _address(self.host)
        if address is None:
            return False
        return address.is_loopback or (own is not None and own.is_unspecified)

    def _check_template_kwargs(self) -> None:
        name, given = "default_chat_template_kwargs", self.default_chat_template_kwargs
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name} must be an object, got {shown(given)}")
        try:
            text = json.dumps(dict(given), ensure_ascii=False, allow_nan=False)
            text.encode()
            own = json.loads(text)
            is_deep = _depth(own) > _MAX_DEPTH
        except RecursionError:
            is_deep = True
        except (TypeError, ValueError):
            raise ConfigError(
                f"{name} must be JSON, its numbers finite and its text valid Unicode"
            ) from None
        if is_deep:
            raise ConfigError(f"{name} must be nested {_MAX_DEPTH} deep at most")
        object.__setattr__(self, name, own)

    def _check_api_key(self) -> None:
        key = self.api_key
        if key is not None and not (_is_text(key) and re.fullmatch(r"[!-~]+", key)):
            # The key itself is shown nowhere.
            raise ConfigError(
                f"api_key (or {API_KEY_VARIABLE}) must be one or more printable ASCII characters "
                "without a space"
            )
        if key is None and not self.allow_unauthenticated and not self.is_loopback:
            raise ConfigError(
                f"host {self.host} can be reached from other machines: give --api-key (or "
                f"{API_KEY_VARIABLE}), or --allow-unauthenticated"
            )


def _depth(value: object) -> int:
    """Objects and lists within each other."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
