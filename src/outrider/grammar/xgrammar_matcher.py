"""Grammars of the library xgrammar; the only module in this process that imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xgrammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int32
    from numpy.typing import NDArray


class XGrammarVocabulary:
    """The tokens of a checkpoint, as the library wants them.

    Args:
        token_bytes: of each id of the model; an empty one is never allowed by a grammar.
        stop_token_ids: ids that end a text.
    """

    def __init__(self, token_bytes: Sequence[bytes], stop_token_ids: Sequence[int]) -> None:
        self._size = len(token_bytes)
        self.tokenizer_info = xgrammar.TokenizerInfo(
            list(token_bytes),
            xgrammar.VocabType.RAW,
            vocab_size=self._size,
            stop_token_ids=list(stop_token_ids),
        )

    def read(self, compiled: str) -> XGrammarGrammar:
        """The grammar that a compiler has written as text."""
        grammar = xgrammar.CompiledGrammar.deserialize_json(compiled, self.tokenizer_info)
        return XGrammarGrammar(grammar, self._size)


class XGrammarGrammar:
    """A compiled grammar, which any number of outputs may follow."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._grammar = grammar
        self._vocab_size = vocab_size
        self.num_bytes: int = grammar.memory_size_bytes

    def matcher(self) -> XGrammarMatcher:
        """A matcher at the beginning."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._grammar), self._vocab_size)


class XGrammarMatcher:
    """The `Matcher` of a compiled grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def accept(self, token_id: int) -> bool:
        """Takes up one more token."""
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens."""
        self._matcher.rollback(num_tokens)

    def bitmask(self) -> NDArray[int32] | None:
        """Which ids may follow."""
        bitmask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        if not self._matcher.fill_next_token_bitmask(bitmask):
            return None
        mask: NDArray[int32] = bitmask[0].numpy()
        return mask

    def is_terminated(self) -> bool:
        """Whether the text has ended."""
        return bool(self._matcher.is_terminated())
