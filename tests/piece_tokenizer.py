"""A tokenizer whose tokens are given byte by byte, so that a test decides where a token ends."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models
from tokenizers.processors import TemplateProcessing

from outrider.tokenizer import _BYTE_VALUES, Tokenizer

_CHARS = {value: char for char, value in _BYTE_VALUES.items()}


def piece_tokenizer(
    pieces: Sequence[bytes | None], special: Sequence[str] = (), eos_token_ids: Sequence[int] = ()
) -> Tokenizer:
    """Tokens 0, 1, ... are the pieces; where there is None the id has no token.

    Special tokens come after them, and only where each id has a piece.
    """
    vocab = {
        "".join(_CHARS[value] for value in piece): token_id
        for token_id, piece in enumerate(pieces)
        if piece is not None
    }
    assert len(vocab) == len(pieces) - pieces.count(None), "two pieces are the same"
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, eos_token_ids)


def tokenizer_with_bos(pieces: Sequence[bytes | None]) -> Tokenizer:
    """One that begins every text with a token of its own, the one after the pieces."""
    tokenizer = piece_tokenizer(pieces, special=["<bos>"])
    tokenizer._backend.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", len(pieces))]
    )
    return tokenizer
