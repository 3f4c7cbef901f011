"""Facts about the bundled tokenizer, and its reproduction."""

import json
import random
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from outrider.training import tokenizer as tokenizer_module
from outrider.training.corpus import collect_documents
from outrider.training.documents import Document
from outrider.training.tokenizer import (
    CHAT_TEMPLATE,
    MARKER_TOKENS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    main,
    save_tokenizer,
    train_tokenizer,
)

BUNDLED = Path(__file__).parents[2] / "src" / "outrider" / "bundled"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def test_vocabulary_is_full_and_matches_the_configuration(tokenizer: Tokenizer) -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == config["vocab_size"] == 4096
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert config["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>") == 0


@pytest.mark.parametrize("token", [*SPECIAL_TOKENS, *MARKER_TOKENS])
def test_named_tokens_have_one_id(tokenizer: Tokenizer, token: str) -> None:
    ids = tokenizer.encode(f"a{token}b").ids
    assert len(ids) == 3
    kept = tokenizer.decode(ids, skip_special_tokens=True)
    assert kept == (f"a{token}b" if token in MARKER_TOKENS else "ab")


def test_every_text_survives_a_round_trip(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    ranges = (range(0x80), range(0x80, 0xD800), range(0xE000, 0x110000))
    for _ in range(200):
        text = "".join(chr(rng.choice(rng.choice(ranges))) for _ in range(40))
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    for text in ("", "\r\n\t x\n\n\n    y  \n", "\ufeff\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_an_entry(tokenizer: Tokenizer) -> None:
    # Each byte of the UTF-8 code space stands in the vocabulary on its own; 0xC0, 0xC1 and 0xF5 to
    # 0xFF occur in no text, and are there all the same.
    single = [token for token in tokenizer.get_vocab() if len(token) == 1]
    assert len(single) == 256


def test_held_out_python_takes_at_least_2_8_bytes_a_token(tokenizer: Tokenizer) -> None:
    texts = [document.text for document in collect_documents(held_out=True)]
    num_tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts))
    assert sum(len(text.encode()) for text in texts) / num_tokens >= 2.8


def test_borders_of_words_digits_marks_and_indents(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("if x[10]==y:\n        return\n").tokens
    assert tokens == ["if", "Ġx", "[", "1", "0", "]", "==", "y", ":", "Ċ" + 8 * "Ġ", "return", "Ċ"]


def test_training_is_deterministic(tmp_path: Path) -> None:
    texts = [document.text for document in collect_documents(held_out=True)]
    for name in ("first", "second"):
        save_tokenizer(train_tokenizer(texts, vocab_size=600), tmp_path / name)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_bundled_files_are_what_the_script_writes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (BUNDLED / path.name).read_bytes()


def test_what_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenizer_module, "collect_documents", lambda: [Document("a.py", "pass")])
    assert main([str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    taken = tmp_path / "out" / "tokenizer.json"
    assert main([str(taken)]) == 2
    assert capsys.readouterr().err == f"error: {taken}: File exists\n"
    (tmp_path / "other" / "tokenizer.json").mkdir(parents=True)
    assert main([str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/other/tokenizer.json: Is a directory\n"


def test_chat_template_renders_roles_thinking_and_tools() -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(CHAT_TEMPLATE)
    calls = [
        {"function": {"name": "add", "arguments": {"a": 1, "b": "x"}}},
        {"function": {"name": "now", "arguments": {}}},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "reasoning_content": "Sum.", "tool_calls": calls},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "noon"},
    ]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nSum.\n</think>\n\n"
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n"
        "</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n"
        "<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    closed = template.render(
        messages=messages[1:2], add_generation_prompt=True, enable_thinking=False
    )
    assert closed.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_transformers_loads_it() -> None:
    transformers = pytest.importorskip("transformers", reason="the reference is a test dependency")
    loaded = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    assert len(loaded) == VOCAB_SIZE
    assert loaded.eos_token_id == loaded.pad_token_id == 0
    text = "def f(x):\n    return x + 1\n"
    assert loaded.decode(loaded.encode(text)) == text
    rendered = loaded.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
