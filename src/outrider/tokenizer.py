"""Text to token ids and back, as transformers does it, from the files of a checkpoint.

It stands outside the step: prompts are encoded before a request is added, and a front end turns the
ids of each step into text with an `IncrementalDetokenizer`.
"""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders

from outrider.errors import CheckpointError, check_unicode, shown
from outrider.generation_config import GenerationConfig
from outrider.json_file import read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LISTED_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _byte_values() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    A printable byte of Latin-1 stands for itself; the others follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    values = {chr(value): value for value in printable}
    return values | {chr(0x100 + index): value for index, value in enumerate(others)}


_BYTE_VALUES = _byte_values()


class Tokenizer:
    """A byte-level BPE tokenizer.

    Attributes:
        num_tokens: ids from here on have no token; a model's vocabulary may be padded beyond it.
        missing_ids: ids below that have none either.
        eos_token_ids: ids that end an output, from tokenizer_config.json's `eos_token` and
            generation_config.json.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Sequence[int] = ()) -> None:
        self._backend = backend
        self._special_ids = {
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._bytes: dict[int, bytes] = {}
        token_ids = set(backend.get_vocab(with_added_tokens=True).values())
        self.num_tokens = 1 + max(token_ids, default=-1)
        self.missing_ids = frozenset(range(self.num_tokens)) - token_ids
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_pretrained(cls, model_dir: str | Path, vocab_size: int | None = None) -> Tokenizer:
        """Read the tokenizer of a checkpoint directory.

        Args:
            model_dir: holds tokenizer.json, and perhaps tokenizer_config.json and
                generation_config.json.
            vocab_size: rows of the model's embedding; None leaves the number of tokens unchecked.
        """
        path = Path(model_dir) / TOKENIZER_NAME
        backend = _load(path)
        config = _read_config(path.with_name(TOKENIZER_CONFIG_NAME))
        _add_tokens(backend, config, path.with_name(TOKENIZER_CONFIG_NAME))
        eos_token_ids = list(GenerationConfig.from_pretrained(model_dir).eos_token_ids)
        eos_token = _token(config.get("eos_token"))
        eos_token_id = None if eos_token is None else backend.token_to_id(eos_token.content)
        if eos_token_id is not None:
            eos_token_ids.insert(0, eos_token_id)
        tokenizer = cls(backend, tuple(dict.fromkeys(eos_token_ids)))
        if vocab_size is not None and tokenizer.num_tokens > vocab_size:
            raise CheckpointError(
                f"{path}: larger than the embedding: {tokenizer.num_tokens} tokens, but vocab_size "
                f"in config.json is {vocab_size}"
            )
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens that are written out in it are recognised.

        Args:
            text: any.
            add_special_tokens: put around it what the tokenizer puts around every text.
        """
        check_unicode("the prompt", text)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """Bytes that a token adds to the text; none for an id without a token."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        try:
            return bytes(_BYTE_VALUES[char] for char in token)
        except KeyError:
            # An added token with a character outside the byte alphabet, such as a space, is text.
            return token.encode()


class IncrementalDetokenizer:
    """Text of a growing list of tokens: each call returns what became certain.

    A character whose bytes lie in several tokens appears with the last of them, so nothing is ever
    taken back, and all pieces together are what `Tokenizer.decode` makes of the whole list.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens complete."""
        return "".join(
            self._decoder.decode(self._tokenizer.token_bytes(token_id, self._skip_special_tokens))
            for token_id in token_ids
        )

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; is the download complete?")
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_bytes().decode())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:
        # The library raises Exception itself, for whatever is wrong with the file.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: no valid tokenizer: {reason}") from None
    if not isinstance(backend.decoder, decoders.ByteLevel):
        raise CheckpointError(f"{path}: the decoder must be ByteLevel, as in byte-level BPE")
    # What a training script left switched on would cut or pad every prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_config(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _token(value: object) -> AddedToken | None:
    """A token given as a string or as an object with its flags; None for anything else."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=True)
    if not isinstance(value, dict):
        return None
    content = value.get("content")
    flags = {name: value[name] for name in _TOKEN_FLAGS if name in value}
    is_right = isinstance(content, str) and all(type(flag) is bool for flag in flags.values())
    return AddedToken(content, **flags) if is_right and content else None


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], path: Path) -> None:
    """Add to tokenizer.json's tokens those that tokenizer_config.json knows besides.

    What goes around a text is the post-processor of tokenizer.json alone: `add_bos_token` does not
    change it in transformers either.
    """
    for token_id, token in _decoder_tokens(config, path):
        _add(backend, token)
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{path}: added_tokens_decoder gives {shown(token.content)} the id {token_id}, "
                f"but {TOKENIZER_NAME} makes it {backend.token_to_id(token.content)}"
            )
    for token in _special_tokens(config):
        known = {known.content for known in backend.get_added_tokens_decoder().values()}
        if token.content not in known:
            token.special = True
            _add(backend, token)


def _decoder_tokens(config: dict[str, Any], path: Path) -> list[tuple[int, AddedToken]]:
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder must be an object")
    tokens = []
    for key, entry in entries.items():
        token = _token(entry)
        if token is None or not re.fullmatch(r"[0-9]{1,9}", key):
            raise CheckpointError(
                f"{path}: added_tokens_decoder must map token ids to tokens, got "
                f"{shown(key)}: {shown(entry)}"
            )
        tokens.append((int(key), token))
    # A new token takes the next free id, so the order matters.
    return sorted(tokens, key=lambda pair: pair[0])


def _special_tokens(config: dict[str, Any]) -> Iterator[AddedToken]:
    values = [config.get(name) for name in NAMED_TOKENS]
    for name in _LISTED_TOKENS:
        listed = config.get(name)
        if isinstance(listed, dict):
            values += listed.values()
        elif isinstance(listed, list):
            values += listed
    yield from (token for token in map(_token, values) if token is not None)


def _add(backend: tokenizers.Tokenizer, token: AddedToken) -> None:
    if token.special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])
