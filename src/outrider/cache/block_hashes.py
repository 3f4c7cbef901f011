"""Names the contents of the blocks of a sequence: by all tokens up to their ends, not by their own.

What a block holds depends on every token before it, so the hash of a block is made of the hash of
the one before it and of its own tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str | None
) -> None:
    """Appends the hashes of the blocks that a sequence has filled.

    Args:
        hashes: of its first blocks, as far as they are known; empty at first.
        token_ids: the sequence.
        block_size: tokens of a block.
        salt: sequences with different salts have no hash in common; None is a salt of its own.
    """
    for number in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else _root(salt)
        tokens = array("q", token_ids[number * block_size : (number + 1) * block_size])
        hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())


def _root(salt: str | None) -> bytes:
    return b"" if salt is None else hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
