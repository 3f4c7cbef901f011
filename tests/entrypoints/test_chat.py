"""`LLM.chat`: conversations are checked, told in the template's words, and answered."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.chat_template import ChatOptions
from outrider.entrypoints.chat_renderer import ChatRenderer
from outrider.errors import RequestError
from outrider.tokenizer import Tokenizer
from tests.models.tiny_checkpoint import edit_json

GREEDY = SamplingParams(temperature=0, max_tokens=5)
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(BUNDLED_MODEL_DIR)
    return tokenizer


@pytest.fixture
def renderer(tokenizer: Tokenizer) -> ChatRenderer:
    return ChatRenderer(tokenizer, BUNDLED_MODEL_DIR)


def test_a_conversation(llm: LLM, reference: Any) -> None:
    (result,) = llm.chat(HELLO, GREEDY)
    chat: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    assert result.prompt_token_ids == reference.apply_chat_template(HELLO, **chat)
    assert result.prompt == reference.apply_chat_template(HELLO, tokenize=False, **chat)
    (plain,) = llm.generate({"prompt_token_ids": result.prompt_token_ids}, GREEDY)
    assert result.outputs == plain.outputs
    options: dict[str, Any] = {"tools": [TOOL], "add_generation_prompt": False}
    (result,) = llm.chat(HELLO, GREEDY, **options)
    assert result.prompt_token_ids == reference.apply_chat_template(
        HELLO, return_dict=False, **options
    )
    (result,) = llm.chat(HELLO, GREEDY, chat_template_kwargs={"enable_thinking": False})
    assert result.prompt is not None
    assert result.prompt.endswith("<think>\n\n</think>\n\n")
    (result,) = llm.chat(HELLO, GREEDY, chat_template="{{ messages[-1].content }}")
    assert result.prompt == "Hi"
    (result,) = llm.chat(
        [*HELLO, {"role": "assistant", "content": "I am"}],
        GREEDY,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert result.prompt is not None
    assert result.prompt.endswith("I am")


def test_several_conversations(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=2)]
    first, second = llm.chat([HELLO, HELLO[1:]], params, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    assert [len(one.outputs[0].token_ids) for one in (first, second)] == [5, 2]
    assert first.outputs == llm.chat(HELLO, GREEDY)[0].outputs
    assert llm.chat([HELLO])[0].prompt == first.prompt


def test_special_tokens_are_the_templates(llm: LLM, own_model_dir: Path) -> None:
    """A tokenizer that begins every text with a token does not begin a conversation with two."""

    def add_bos(config: Any) -> None:
        config["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
            },
        }

    edit_json(own_model_dir / "tokenizer.json", add_bos)
    tokenizer = Tokenizer.from_pretrained(own_model_dir)
    assert tokenizer.encode("Hi")[0] == 0
    encoded = ChatRenderer(tokenizer, own_model_dir).encode_one(HELLO, ChatOptions())
    assert encoded.token_ids == llm.chat(HELLO, GREEDY)[0].prompt_token_ids


def test_parts_become_one_text(renderer: ChatRenderer) -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, "c"]
    (expected,) = renderer.encode([{"role": "user", "content": "a\nb\nc"}], ChatOptions())
    assert renderer.encode([{"role": "user", "content": parts}], ChatOptions()) == [expected]


def test_arguments_of_calls_become_objects(renderer: ChatRenderer) -> None:
    def prompt(arguments: Any) -> str | None:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
        return renderer.encode_one(messages, ChatOptions()).text

    text = prompt('{"city":"Bern"}')
    assert text == prompt({"city": "Bern"})
    assert text is not None
    assert "<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>" in text
    # What a model has written wrong stays as it is.
    assert '<function=weather>\n{"city"}\n</function>' in (prompt('{"city"}') or "")


USER = {"role": "user", "content": "a"}
BAD: dict[str, tuple[Any, str]] = {
    "text": ("Hi", "messages must be a list of messages, got 'Hi'"),
    "nothing": (None, "messages must be a list of messages, got None"),
    "no message": ([], "messages is empty: at least one message is needed"),
    "no message in one": ([[USER], []], "messages[1] is empty"),
    "text in a list": ([USER, "Hi"], "messages[1] must be an object with role and content"),
    "texts": (["Hi"], "messages[0] must be a list of messages, got 'Hi'"),
    "no role": ([{"content": "a"}], "messages[0].role must be a text such as user, got None"),
    "number as role": ([{"role": 1, "content": "a"}], "messages[0].role must be a text"),
    "no content": ([USER, {"role": "user"}], "messages[1].content is missing"),
    "empty answer": ([{"role": "assistant", "content": None}], "messages[0].content is missing"),
    "number": ([{"role": "user", "content": 3}], "messages[0].content must be a text or a list"),
    "picture": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "messages[0].content[0]: only parts of the type text are supported, got 'image_url'",
    ),
    "part": (
        [[USER], [{"role": "user", "content": [{"type": "text"}]}]],
        "messages[1][0].content[0] must be a part such as",
    ),
    "calls": (
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        "messages[0].tool_calls must be a list of calls",
    ),
    "call": ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0] must be an"),
    "surrogate": ([{"role": "user", "content": "\ud800"}], "the prompt is no valid Unicode text"),
    "long": ([{"role": "user", "content": "word " * 300}], "maximum context length is 256 tokens"),
}


@pytest.mark.parametrize(("messages", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_messages(llm: LLM, messages: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as raised:
        llm.chat(messages, GREEDY)
    assert "\n" not in str(raised.value)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("tools", ["weather", [print], {"name": "weather"}])
def test_bad_tools(llm: LLM, tools: Any) -> None:
    with pytest.raises(RequestError, match=r"^tools must be a list of JSON schemas"):
        llm.chat(HELLO, GREEDY, tools=tools)


def test_a_chat_for_event_loops(model_dir: Path, llm: LLM) -> None:
    async_llm = AsyncLLM(model_dir)

    async def answer() -> list[int]:
        prompt = async_llm.render_chat(HELLO, tools=[TOOL])
        async for output in async_llm.generate(prompt, GREEDY, "a"):
            last = output
        assert last.prompt == llm.chat(HELLO, GREEDY, tools=[TOOL])[0].prompt
        return last.outputs[0].token_ids

    try:
        assert (
            asyncio.run(answer()) == llm.chat(HELLO, GREEDY, tools=[TOOL])[0].outputs[0].token_ids
        )
        with pytest.raises(RequestError, match=r"^messages\[0\] must be an object"):
            async_llm.render_chat([HELLO])  # type: ignore[list-item]
    finally:
        async_llm.shutdown()
