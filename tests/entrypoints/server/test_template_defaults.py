"""Variables of the chat template that the server sets, for chats that do not."""

from pathlib import Path
from typing import Any

import pytest

from outrider.entrypoints.chat_renderer import ChatRenderer
from outrider.entrypoints.server.run import check_template_kwargs
from outrider.errors import ConfigError
from tests.entrypoints.server.app_client import AppClient, bundled_served_model, bundled_tokenizer
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM

OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
ENDS = {False: "<think>\n\n</think>\n\n", True: "<think>\n", None: "assistant\n"}
TOOL = {"type": "function", "function": {"name": "f"}}


def prompt_of(client: AppClient, **body: Any) -> str:
    assert client.chat(**body).status_code == 200
    prompt = client.api.serving._llm.prompts[-1]  # type: ignore[attr-defined]
    told = client.post(
        "/tokenize",
        {
            "messages": [{"role": "user", "content": "hi"}],
            **{name: body[name] for name in ("tools", "chat_template_kwargs") if name in body},
        },
    )
    if "reasoning_effort" not in body:
        assert told.json()["tokens"] == prompt.token_ids
    return str(prompt.text)


@pytest.mark.parametrize(
    ("default", "body", "is_on"),
    [
        ({}, {}, None),
        (OFF, {}, False),
        (ON, {}, True),
        (OFF, {"chat_template_kwargs": None}, False),
        (OFF, {"chat_template_kwargs": {}}, False),
        (OFF, {"chat_template_kwargs": ON}, True),
        (ON, {"chat_template_kwargs": OFF}, False),
        (OFF, {"reasoning_effort": "high"}, True),
        (ON, {"reasoning_effort": "none"}, False),
        (OFF, {"reasoning_effort": "none", "chat_template_kwargs": ON}, True),
    ],
)
def test_what_a_chat_sets_itself_wins(
    default: dict[str, bool], body: dict[str, Any], is_on: bool | None
) -> None:
    client = AppClient.over(ScriptedLLM(HELLO), default_chat_template_kwargs=default)
    assert prompt_of(client, **body).endswith(ENDS[is_on])


def test_of_several_templates_each_is_told_what_it_reads(tmp_path: Path) -> None:
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (tmp_path / "chat_template.jinja").write_text("plain {{ one }}")
    (folder / "tool_use.jinja").write_text("tools {{ two }}")
    kwargs = {"one": 1, "two": [2]}
    check_template_kwargs(kwargs, tmp_path)
    with pytest.raises(ConfigError, match="reads no variable 'three'; those that it reads: one, t"):
        check_template_kwargs({"three": 3}, tmp_path)
    model = bundled_served_model(chat_renderer=ChatRenderer(bundled_tokenizer(), tmp_path))
    client = AppClient.over(
        ScriptedLLM(HELLO),
        model,
        tool_call_parser="qwen3_coder",
        enable_auto_tool_choice=True,
        default_chat_template_kwargs=kwargs,
    )
    assert prompt_of(client) == "plain 1"
    assert prompt_of(client, tools=[TOOL]) == "tools [2]"
    assert prompt_of(client, chat_template_kwargs={"one": 3}) == "plain 3"


def test_a_checkpoint_without_a_template_has_nothing_to_set(tmp_path: Path) -> None:
    check_template_kwargs({}, tmp_path)
    with pytest.raises(ConfigError, match="those that it reads: none"):
        check_template_kwargs(OFF, tmp_path)
