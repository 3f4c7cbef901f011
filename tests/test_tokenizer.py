"""Text becomes the ids that transformers makes of it, and ids become text piece by piece."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from outrider.errors import CheckpointError, RequestError
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer

BUNDLED = Path(__file__).parents[1] / "src" / "outrider" / "bundled"
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TEXTS = (
    "def f(x):\n    return x <|im_end|> <think>\nhi</think>",
    "<foo> <bar>x <x y>z a<é begin>b",
    "naïve 日本 🎉\r\n\r\n\t\x00",
    "<|im_start|><|im_start|>user\n<|im_",
    " ",
    "",
)

Json = dict[str, Any]


def added(content: str, token_id: int | None = None, **flags: bool) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False} | flags
    token: Json = {"content": content, "special": True, **flags}
    return token if token_id is None else {"id": token_id, **token}


def edit_more_tokens(tokenizer: Json, config: Json) -> None:
    tokenizer["added_tokens"].append(added("<é begin>", 4096))
    config["added_tokens_decoder"]["4097"] = added("<x y>", special=False, lstrip=True)
    config["added_tokens_decoder"]["4"] = added("</think>", special=True)


def edit_named_tokens(tokenizer: Json, config: Json) -> None:
    config["extra_special_tokens"] = ["<foo>"]
    config["mask_token"] = {"__type": "AddedToken", **added("<bar>", lstrip=True)}
    config["unk_token"] = "return"


def edit_ends(tokenizer: Json, config: Json) -> None:
    config["add_bos_token"] = config["add_eos_token"] = True
    config["bos_token"] = "<|im_start|>"


def edit_template(tokenizer: Json, config: Json) -> None:
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }


def edit_limits(tokenizer: Json, config: Json) -> None:
    tokenizer["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }


def edit_nothing(tokenizer: Json, config: Json) -> None:
    pass


def write(folder: Path, edit: Callable[[Json, Json], None] = edit_nothing) -> Path:
    for name in FILES:
        shutil.copy(BUNDLED / name, folder)
    paths = [folder / name for name in FILES[:2]]
    values = [json.loads(path.read_text()) for path in paths]
    edit(*values)
    for path, value in zip(paths, values, strict=True):
        path.write_text(json.dumps(value))
    return folder


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer.from_pretrained(BUNDLED)


def pieces(tokenizer: Tokenizer, token_ids: list[int], skip: bool = True) -> list[str]:
    """What each token adds, and what is left at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*(detokenizer.append([token_id]) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize(
    "edit",
    [edit_nothing, edit_more_tokens, edit_named_tokens, edit_ends, edit_template, edit_limits],
)
def test_agrees_with_transformers(tmp_path: Path, edit: Callable[[Json, Json], None]) -> None:
    folder = write(tmp_path, edit)
    ours, theirs = Tokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.num_tokens == len(theirs)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    rng = random.Random(0)
    for _ in range(200):
        # Half of them single bytes, so that few texts are sound UTF-8.
        ids = [rng.randrange(rng.choice((263, ours.num_tokens))) for _ in range(rng.randrange(9))]
        for skip in (True, False):
            text = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == text, ids
            assert "".join(pieces(ours, ids, skip)) == text, ids


@given(st.text(max_size=12))
def test_no_piece_holds_half_a_character(bundled: Tokenizer, text: str) -> None:
    got = pieces(bundled, bundled.encode(text), skip=False)
    assert "".join(got) == text
    assert got[-1] == ""
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in got)


def test_a_character_appears_with_its_last_byte(bundled: Tokenizer) -> None:
    ids = bundled.encode("🎉")
    assert len(ids) == 4
    assert pieces(bundled, ids) == ["", "", "", "🎉", ""]
    assert pieces(bundled, ids[:3]) == ["", "", "", "\ufffd"]
    # What cannot become a character is not held back.
    assert pieces(bundled, [*ids[:2], *bundled.encode("x")]) == ["", "", "\ufffdx", ""]
    assert pieces(bundled, ids[1:3]) == ["\ufffd", "\ufffd", ""]


def test_a_literal_replacement_character_is_not_held_back(bundled: Tokenizer) -> None:
    ids = bundled.encode("\ufffd")
    assert "".join(pieces(bundled, ids)[:-1]) == "\ufffd"


def test_special_tokens_are_skipped_and_markers_kept(bundled: Tokenizer) -> None:
    ids = bundled.encode("<think>a</think><|im_end|><|endoftext|>")
    assert "".join(pieces(bundled, ids)) == bundled.decode(ids) == "<think>a</think>"
    # They do not part the bytes of a character either.
    first, *rest = bundled.encode("é")
    assert "".join(pieces(bundled, [first, 2, *rest])) == "é"


def test_an_id_without_a_token_adds_nothing(bundled: Tokenizer) -> None:
    assert pieces(bundled, [bundled.num_tokens, -1, 10**9]) == ["", "", "", ""]


def test_end_of_sequence_ids(bundled: Tokenizer, tmp_path: Path) -> None:
    assert bundled.eos_token_ids == (0, 2)
    write(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.from_pretrained(tmp_path).eos_token_ids == (0,)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.encode("<think>x") == bundled.encode("<think>x")


def test_a_prompt_that_is_no_text_is_refused(bundled: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"no valid Unicode text: '\\ud83c' at character 1"):
        bundled.encode("a\ud83c")


def test_num_tokens_is_checked_against_the_embedding(tmp_path: Path) -> None:
    folder = write(tmp_path, edit_more_tokens)
    assert Tokenizer.from_pretrained(folder, 4098).num_tokens == 4098
    message = "larger than the embedding: 4098 tokens, but vocab_size in config.json is 4097"
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_pretrained(folder, 4097)


def test_ids_that_have_no_token(bundled: Tokenizer, tmp_path: Path) -> None:
    assert bundled.missing_ids == frozenset()

    def edit(tokenizer: Json, config: Json) -> None:
        vocab = tokenizer["model"]["vocab"]
        last = max(vocab, key=lambda token: vocab[token])
        tokenizer["model"]["merges"].pop()
        vocab[last] += 3

    tokenizer = Tokenizer.from_pretrained(write(tmp_path, edit))
    assert tokenizer.num_tokens == bundled.num_tokens + 3
    last = bundled.num_tokens - 1
    assert tokenizer.missing_ids == {last, last + 1, last + 2}


DAMAGE = {
    "missing": ("tokenizer.json", None, "missing"),
    "empty": ("tokenizer.json", b"", "no valid tokenizer"),
    "cut off": ("tokenizer.json", b'{"version": "1.0", "added_to', "no valid tokenizer"),
    "binary": ("tokenizer.json", b"\xff\xfe\x00", "no valid tokenizer"),
    "no tokenizer": ("tokenizer.json", b"[]", "no valid tokenizer"),
    "config cut off": ("tokenizer_config.json", b'{"a": ', "no valid JSON at line 1"),
    "config a list": ("tokenizer_config.json", b"[]", "must hold a JSON object"),
    "tokens a list": (
        "tokenizer_config.json",
        b'{"added_tokens_decoder": [1]}',
        "added_tokens_decoder must be an object",
    ),
    "token id": (
        "tokenizer_config.json",
        b'{"added_tokens_decoder": {"-1": {"content": "<a>"}}}',
        "must map token ids to tokens, got '-1'",
    ),
    "token flag": (
        "tokenizer_config.json",
        b'{"added_tokens_decoder": {"9": {"content": "<a>", "lstrip": "yes"}}}',
        "must map token ids to tokens, got '9'",
    ),
    "two ids": (
        "tokenizer_config.json",
        b'{"added_tokens_decoder": {"9": {"content": "<think>"}}}',
        "gives '<think>' the id 9, but tokenizer.json makes it 3",
    ),
    "eos ids": ("generation_config.json", b'{"eos_token_id": ["x"]}', "eos_token_id must be"),
}


@pytest.mark.parametrize(("name", "data", "reason"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(tmp_path: Path, name: str, data: bytes | None, reason: str) -> None:
    path = write(tmp_path) / name
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(reason)) as raised:
        Tokenizer.from_pretrained(tmp_path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_byte_level_decoders(tmp_path: Path) -> None:
    def edit(tokenizer: Json, config: Json) -> None:
        tokenizer["decoder"] = {"type": "Fuse"}

    with pytest.raises(CheckpointError, match="the decoder must be ByteLevel"):
        Tokenizer.from_pretrained(write(tmp_path, edit))
