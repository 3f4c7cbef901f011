"""Chat templates: the text that transformers makes, and what a bad template may not do."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.chat_template import MAX_RENDERED_CHARACTERS, ChatOptions, ChatTemplate
from outrider.errors import CheckpointError, OutriderError, RequestError
from tests.models.tiny_checkpoint import edit_json

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says "how" it <is> & ïs: 晴',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bäle", "n": 2}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "Hi <there> & 'you'"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n "}],
    "turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "reasoning_content": "Easy.", "content": "2"},
        {"role": "user", "content": "And 2 + 2?"},
    ],
    "calls": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": '{"t": 21}'},
        {"role": "tool", "content": '{"t": 22}'},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Thanks"},
    ],
}
# The constructs that templates of this family are made of.
FAMILY_TEMPLATE = """
{%- macro said(content) %}
    {%- if content is string %}{{ content }}{% elif content is none %}{% else %}
        {{- raise_exception('no text') }}
    {%- endif %}
{%- endmacro %}
{#- a comment #}
{{- bos_token if bos_token is defined }}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n' + (tools | tojson(indent=2)) + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if message.role == 'user' and not message.content.startswith('<tool>') %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
    <|im_start|>assistant
        {% generation %}
        {%- set content = said(message.content) %}
        {%- if loop.index0 > ns.last and message.reasoning_content is defined %}
            {{- '<think>' + message.reasoning_content.strip('\n') + '</think>' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\n<tool_call>' + call.name }}
            {%- for name, value in call.arguments | items %}
                {{- '\n<' ~ name ~ '>' ~ (value | tojson if value is not string else value) }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}{{ '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool>' + said(message.content) | trim + '</tool>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + said(message.content) + eos_token + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


def write(folder: Path, template: Any, **values: Any) -> Path:
    """Tokenizer files of the bundled checkpoint with another template."""
    (folder / "tokenizer.json").write_bytes((BUNDLED_MODEL_DIR / "tokenizer.json").read_bytes())
    config = json.loads((BUNDLED_MODEL_DIR / "tokenizer_config.json").read_text())
    config = {**config, "chat_template": template, **values}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def rendered(folder: Path, messages: Any, **options: Any) -> str:
    return ChatTemplate.from_pretrained(folder).render(messages, ChatOptions(**options))


def reference(folder: Path, messages: Any, **options: Any) -> str:
    options = {"add_generation_prompt": True, **options}
    options |= options.pop("template_kwargs", {})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"tools": [WEATHER, WEATHER]},
    "no tools": {"tools": []},
    "thinking": {"template_kwargs": {"enable_thinking": True}},
    "not thinking": {"template_kwargs": {"enable_thinking": False, "eos_token": "<end>"}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_the_text_is_that_of_transformers(
    tmp_path: Path, messages: Any, options: dict[str, Any]
) -> None:
    bos_token = {"__type": "AddedToken", "content": "<|im_start|>", "lstrip": False}
    folder = write(tmp_path, FAMILY_TEMPLATE, bos_token=bos_token)
    for checkpoint in (BUNDLED_MODEL_DIR, folder):
        assert rendered(checkpoint, messages, **options) == reference(
            checkpoint, messages, **options
        )


@pytest.mark.parametrize("end", ["abc", "abc ", " abc\n", ""])
@pytest.mark.parametrize("template", ["{{ content }}", "{{ content | trim }}"])
def test_the_last_message_goes_on(tmp_path: Path, template: str, end: str) -> None:
    body = template.replace("content", "m.content")
    folder = write(tmp_path, f"{{% for m in messages %}}[{body}]{{% endfor %}} end")
    messages = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": end}]
    options: Any = {"continue_final_message": True, "add_generation_prompt": False}
    text = rendered(folder, messages, **options)
    assert text == reference(folder, messages, **options)
    assert text.startswith("[")
    assert "end" not in text
    # The messages are the caller's.
    assert messages[-1]["content"] == end
    bundled = rendered(BUNDLED_MODEL_DIR, messages, **options)
    assert bundled == reference(BUNDLED_MODEL_DIR, messages, **options)


@pytest.mark.parametrize(
    ("messages", "template", "reason"),
    [
        ([{"role": "assistant", "content": None}], None, "the last message has no content"),
        ([{"role": "user", "content": "a"}], "{{ messages[0].role }}", "knows no content"),
        (
            [{"role": "user", "content": "abc"}],
            "{{ messages[0].content[:2] }}",
            "the last message does not stand in what the chat template makes of it",
        ),
    ],
)
def test_a_message_that_cannot_go_on(messages: Any, template: str | None, reason: str) -> None:
    with pytest.raises(RequestError, match=f"^continue_final_message: .*{reason}"):
        rendered(
            BUNDLED_MODEL_DIR,
            messages,
            chat_template=template,
            continue_final_message=True,
            add_generation_prompt=False,
        )


def test_where_templates_lie(tmp_path: Path) -> None:
    messages = CONVERSATIONS["user"]
    folder = write(tmp_path, "in the config")
    assert rendered(folder, messages) == "in the config"
    listed = [
        {"name": "default", "template": "listed"},
        {"name": "tool_use", "template": "listed for tools"},
        {"name": "other", "template": "{{ eos_token }} other"},
    ]
    write(folder, listed)
    for options in ({}, {"tools": [WEATHER]}, {"chat_template": "other"}):
        assert rendered(folder, messages, **options) == reference(folder, messages, **options)
    assert rendered(folder, messages, tools=[WEATHER]) == "listed for tools"
    assert rendered(folder, messages, chat_template="other") == "<|endoftext|> other"
    assert rendered(folder, messages, chat_template="a new one") == "a new one"
    (folder / "chat_template.jinja").write_text("in a file: ä\n", encoding="utf-8")
    assert rendered(folder, messages) == reference(folder, messages) == "in a file: ä"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("in a file for tools")
    assert rendered(folder, messages, tools=[WEATHER]) == "in a file for tools"
    assert reference(folder, messages, tools=[WEATHER]) == "in a file for tools"


def test_the_day_of_today() -> None:
    text = rendered(BUNDLED_MODEL_DIR, [{"role": "user"}], chat_template="{{ strftime_now('%Y') }}")
    assert abs(int(text) - datetime.now().year) <= 1


ONE = [{"role": "user", "content": "a"}]
BAD_TEMPLATES: dict[str, tuple[str, str]] = {
    "syntax": ("a\n{% if %}", "chat_template, line 2: Expected an expression, got 'end of stat"),
    "unknown tag": ("{% include 'x' %}", "chat_template fails: TypeError: no loader for this"),
    "unknown filter": ("{{ messages | evil }}", "chat_template, line 1: No filter named 'evil'."),
    "refusal": (
        "{{ raise_exception('Roles must\n alternate') }}",
        "chat_template refuses this: Roles must alternate",
    ),
    "undefined": ("{{ nothing.at.all }}", "chat_template fails: UndefinedError: 'nothing' is un"),
    "type": ("{{ messages + 1 }}", "chat_template fails: TypeError: "),
    "recursion": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "chat_template fails: RecursionError: ",
    ),
    "classes": ("{{ ''.__class__.__mro__ }}", "does what its sandbox forbids: access to attribute"),
    "globals": (
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "does what its sandbox forbids: access to attribute '__globals__'",
    ),
    "generator": ("{{ ((x for x in messages).gi_frame) }}", "chat_template, line 1: "),
    "attr filter": ("{{ (messages | attr('__init__'))() }}", "does what its sandbox forbids"),
    "mutation": ("{{ messages.append(1) }}", "does what its sandbox forbids: access to attribute"),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
    "output": (
        "{% for i in range(99999) %}{{ 'abcdefghij' * 1000 }}{% endfor %}",
        f"chat_template writes more than {MAX_RENDERED_CHARACTERS:,} characters",
    ),
}


@pytest.mark.parametrize(("template", "reason"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES.keys())
def test_a_bad_template_is_one_line(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(RequestError) as raised:
        rendered(BUNDLED_MODEL_DIR, ONE, chat_template=template)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
    # The checkpoint's own is named after it, and a mistake in it is the checkpoint's.
    with pytest.raises(OutriderError) as raised_of_own:
        rendered(write(tmp_path, template), ONE)
    own = reason.replace("chat_template", f"the chat template of {tmp_path}")
    assert own in str(raised_of_own.value)
    kind = CheckpointError if ", line" in reason else RequestError
    assert type(raised_of_own.value) is kind


def test_a_template_sees_nothing_of_python() -> None:
    template = "[{{ ''.__class__ }}{{ '{0.__class__}'.format(1) }}{{ messages.append }}]"
    assert rendered(BUNDLED_MODEL_DIR, ONE, chat_template=template) == "[]"


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        (ONE, {"template_kwargs": {"messages": []}}, "chat_template_kwargs must not hold messages"),
        (ONE, {"template_kwargs": ["a"]}, "chat_template_kwargs must be an object, got ['a']"),
        (ONE, {"template_kwargs": {1: 2}}, "a key in chat_template_kwargs must be a text, got 1"),
        (ONE, {"template_kwargs": {"a": {"b": {1}}}}, "chat_template_kwargs.a.b must be what JSON"),
        ([{"role": "user", "content": ONE.append}], {}, "messages[0].content must be what JSON"),
        (ONE, {"tools": [{"f": print}]}, "tools[0].f must be what JSON holds, got <built-in func"),
        (ONE, {"chat_template": 7}, "chat_template must be a text, got 7"),
        (ONE, {"continue_final_message": True}, "continue_final_message excludes add_generation"),
    ],
)
def test_bad_arguments(messages: Any, options: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(reason)}"):
        rendered(BUNDLED_MODEL_DIR, messages, **options)


def test_what_is_nested_in_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RequestError, match="chat_template_kwargs is nested too deep"):
        rendered(BUNDLED_MODEL_DIR, ONE, template_kwargs={"a": loop})


def test_a_checkpoint_without_a_template(tmp_path: Path) -> None:
    folder = write(tmp_path, None)
    reason = re.escape(f"{folder} has no chat template: give one as chat_template")
    for _ in range(2):
        with pytest.raises(RequestError, match=f"^{reason}$"):
            rendered(folder, ONE)
        assert rendered(folder, ONE, chat_template="{{ messages[0].content }}") == "a"
        (folder / "tokenizer_config.json").unlink(missing_ok=True)


def test_a_checkpoint_with_several_and_no_default(tmp_path: Path) -> None:
    folder = write(tmp_path, [{"name": name, "template": "x"} for name in ("rag", "chat")])
    with pytest.raises(RequestError, match=r"none is the default: name one as .*, of chat, rag$"):
        rendered(folder, ONE)


@pytest.mark.parametrize("template", [7, ["x"], [{"name": "default"}], {"template": 1}])
def test_a_template_of_no_known_form(tmp_path: Path, template: Any) -> None:
    write(tmp_path, template)
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template must be a te"):
        rendered(tmp_path, ONE)


def test_a_template_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: cannot be read: not UTF-8"):
        rendered(tmp_path, ONE)


def test_special_tokens_of_no_known_form_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, "{{ bos_token is defined }} {{ eos_token }}")
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(bos_token=None))
    assert rendered(folder, ONE) == "False <|endoftext|>"


def test_variables_that_may_be_set(tmp_path: Path) -> None:
    template = (
        "{% set own = 1 %}{{ eos_token }}{{ messages[0].content }}{{ own }}{{ raise_exception }}"
        "{% if tools and add_generation_prompt and thinks is defined %}{{ range(n) }}{% endif %}"
    )
    folder = write(tmp_path, template, eos_token="<e>")
    assert ChatTemplate.from_pretrained(folder).variables(ChatOptions()) == {"thinks", "n"}
    with pytest.raises(CheckpointError, match="line 1: unexpected"):
        ChatTemplate.from_pretrained(write(tmp_path, "{{ 1 + }}")).variables(ChatOptions())
