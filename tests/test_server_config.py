from typing import Any

import pytest

from outrider.config import ServerConfig
from outrider.config.server import API_KEY_VARIABLE
from outrider.errors import ConfigError


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"host": ""}, "host must be an address or a name, got ''"),
        ({"host": "a b"}, "host must be an address or a name"),
        ({"host": "http://localhost"}, "host must be an address or a name"),
        ({"host": None}, "host must be an address or a name"),
        ({"port": -1}, "port must be an integer from 0 to 65535, got -1"),
        ({"port": 65536}, "port must be an integer from 0 to 65535"),
        ({"port": True}, "port must be an integer"),
        ({"served_model_name": [""]}, "served_model_name must be a name, got ''"),
        ({"served_model_name": ["a\nb"]}, "served_model_name must be a name"),
        ({"api_key": ""}, "api_key (or OUTRIDER_API_KEY) must be one or more printable ASCII"),
        ({"api_key": "a b"}, "api_key (or OUTRIDER_API_KEY) must be"),
        ({"api_key": "é"}, "api_key (or OUTRIDER_API_KEY) must be"),
        ({"allow_unauthenticated": 1}, "allow_unauthenticated must be true or false"),
        ({"allowed_host": ["http://x"]}, "allowed_host must be a name or an address without"),
        ({"allowed_host": ["x:80"]}, "allowed_host must be a name or an address without"),
        ({"max_num_queued": -1}, "max_num_queued must be an integer 0 or more, got -1"),
        ({"max_body_size": 0}, "max_body_size must be an integer 1 or more, got 0"),
        ({"max_body_size": "lots"}, "max_body_size must be a number of bytes such as 4GiB"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s must be an integer 0 or more"),
        ({"reasoning_parser": "deepseek_r1"}, "reasoning_parser must be qwen3, got 'deepseek_r1'"),
        ({"reasoning_parser": 1}, "reasoning_parser must be qwen3, got 1"),
        ({"tool_call_parser": "hermes"}, "tool_call_parser must be qwen3_coder, got 'hermes'"),
        ({"enable_auto_tool_choice": True}, "enable_auto_tool_choice needs a tool_call_parser"),
        ({"enable_auto_tool_choice": 1}, "enable_auto_tool_choice must be true or false"),
        ({"default_chat_template_kwargs": [1]}, "kwargs must be an object, got [1]"),
        ({"default_chat_template_kwargs": {"a": object()}}, "kwargs must be JSON, its numbers"),
        ({"default_chat_template_kwargs": nested(33)}, "kwargs must be nested 32 deep at most"),
        ({"default_chat_template_kwargs": nested(9999)}, "kwargs must be nested 32 deep at most"),
        ({"ports": 1}, "unknown option 'ports'; the nearest is \"port\""),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_kwargs(**options)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_of_the_template_are_its_own_copy() -> None:
    given = nested(32)
    config = ServerConfig(default_chat_template_kwargs=given)
    given["b"] = 1
    assert config.default_chat_template_kwargs == nested(32)


@pytest.mark.parametrize("key", ["a b", "\n", "é"])
def test_a_wrong_key_is_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key=f"secret{key}")
    assert "secret" not in str(caught.value)


LOOPBACK = ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST"]
REACHABLE = ["0.0.0.0", "::", "192.168.0.5", "10.1.2.3", "box.example", "localhost.example"]


@pytest.mark.parametrize("host", REACHABLE)
def test_where_others_reach_a_key_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines: give --api-key"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, api_key="x").host == host
    assert ServerConfig(host=host, allow_unauthenticated=True).api_key is None


@pytest.mark.parametrize("host", LOOPBACK)
def test_on_the_loopback_none_is_needed(host: str) -> None:
    assert ServerConfig(host=host).is_loopback


def test_the_key_comes_from_the_environment_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ServerConfig.from_kwargs().api_key is None
    monkeypatch.setenv(API_KEY_VARIABLE, "from-there")
    assert ServerConfig.from_kwargs(host="0.0.0.0").api_key == "from-there"
    assert ServerConfig.from_kwargs(api_key="mine").api_key == "mine"
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(ConfigError, match=API_KEY_VARIABLE):
        ServerConfig.from_kwargs()


def test_sizes_have_units() -> None:
    assert ServerConfig.from_kwargs(max_body_size="2MiB").max_body_size == 2 << 20


def test_a_name_is_given_once() -> None:
    assert ServerConfig().with_model_name("a").served_model_name == ("a",)
    named = ServerConfig(served_model_name=("b", "c"))
    assert named.with_model_name("a").served_model_name == ("b", "c")


@pytest.mark.parametrize(
    ("options", "name", "is_allowed"),
    [
        ({}, "localhost", True),
        ({}, "127.0.0.1", True),
        ({}, "::1", True),
        ({}, "192.168.0.5", False),
        ({}, "evil.example", False),
        ({"host": "192.168.0.5", "api_key": "x"}, "192.168.0.5", True),
        ({"host": "192.168.0.5", "api_key": "x"}, "192.168.0.6", False),
        ({"host": "0.0.0.0", "api_key": "x"}, "192.168.0.6", True),
        ({"host": "::", "api_key": "x"}, "fe80::1", True),
        ({"host": "0.0.0.0", "api_key": "x"}, "evil.example", False),
        ({"allowed_host": ["box.example"]}, "BOX.example", True),
        ({"allowed_host": ["box.example"]}, "a.box.example", False),
        ({"allowed_host": ["*"]}, "evil.example", True),
    ],
)
def test_names_that_a_request_may_use(options: dict[str, Any], name: str, is_allowed: bool) -> None:
    assert ServerConfig(**options).allows_host(name) == is_allowed
