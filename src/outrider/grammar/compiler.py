"""Compiled grammars: from a cache, or from a process that may take so long and no longer."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING

from outrider.errors import RequestError
from outrider.grammar.compile_process import CompileProcess, CompilerGoneError
from outrider.grammar.grammar_path import GrammarPath
from outrider.grammar.structural_tag import structural_tag

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from outrider.grammar.xgrammar_matcher import XGrammarGrammar, XGrammarVocabulary
    from outrider.structured_outputs import StructuredOutputsParams
    from outrider.tokenizer import Tokenizer

COMPILE_TIMEOUT_S = 10.0
_MAX_CACHED = 256
_MAX_CACHED_BYTES = 256 << 20


class GrammarCompiler:
    """Compiles what requests ask for, and keeps what was asked for last.

    Nothing is imported, started or held before the first request that has a grammar.

    Args:
        tokenizer: of the checkpoint; without one there are no grammars. Special tokens are part of
            no text, and no grammar allows them.
        vocab_size: V.
        stop_token_ids: ids that end a text; without one there are no grammars.
        timeout_s: seconds for one grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = sorted(i for i in stop_token_ids if i < vocab_size)
        self._timeout_s = timeout_s
        self._process: CompileProcess | None = None
        self._vocabulary: XGrammarVocabulary | None = None
        self._lock = threading.Lock()
        # Its thread starts with the first grammar.
        self._executor = ThreadPoolExecutor(1, "outrider-grammar")
        # The last ones that were asked for, errors as well: who asks again need not wait again.
        self._cache: OrderedDict[StructuredOutputsParams, XGrammarGrammar | str] = OrderedDict()
        # All that somebody holds, in the cache or not.
        self._held: weakref.WeakValueDictionary[StructuredOutputsParams, XGrammarGrammar] = (
            weakref.WeakValueDictionary()
        )

    def check_available(self) -> None:
        """Raises a RequestError where nothing can be compiled."""
        if self._tokenizer is None or not self._stop_token_ids:
            raise RequestError(
                "structured_outputs needs a tokenizer with an end-of-sequence token, and this "
                "engine has none"
            )
        if find_spec("xgrammar") is None:
            raise RequestError(
                "structured_outputs needs xgrammar, which is not installed: "
                "pip install 'outrider[server]'"
            )

    def submit(self, params: StructuredOutputsParams) -> Future[XGrammarGrammar]:
        """Compiles in a thread of its own, in the order of the calls.

        Never waits, whatever is being compiled. While somebody holds the result, `path` does not
        wait either.
        """
        return self._executor.submit(self.compile, params)

    def compile(self, params: StructuredOutputsParams) -> XGrammarGrammar:
        """The compiled grammar; waits for it where it is neither cached nor held.

        Raises:
            RequestError: it cannot be compiled.
        """
        held = self._held.get(params)
        if held is not None:
            return held
        with self._lock:
            found = self._cache.get(params)
            if found is None:
                found = self._compile(params)
                self._cache[params] = found
            self._cache.move_to_end(params)
            self._shrink()
        if isinstance(found, str):
            raise RequestError(found)
        self._held[params] = found
        return found

    def path(self, params: StructuredOutputsParams) -> GrammarPath:
        """The way of one more output through a grammar."""
        return GrammarPath(self.compile(params).matcher())

    def close(self) -> None:
        """Ends the process that compiles, and what it does."""
        if self._process is not None:
            self._process.stop()

    def _compile(self, params: StructuredOutputsParams) -> XGrammarGrammar | str:
        """A grammar, or what is wrong with it.

        Raises:
            CompilerGoneError: nobody has said whether anything is.
        """
        try:
            tag = structural_tag(params)
            if self._process is None or self._vocabulary is None:
                self._start()
            assert self._process is not None, "it has been started"
            assert self._vocabulary is not None, "it has been read"
            grammar = self._vocabulary.read(self._process.compile(tag))
            first = grammar.matcher().bitmask()
        except CompilerGoneError:
            raise
        except RequestError as error:
            return str(error)
        if first is not None and not first.any():
            return "structured_outputs cannot be compiled: there is no text that it allows"
        return grammar

    def _start(self) -> None:
        self.check_available()
        from outrider.grammar.xgrammar_matcher import XGrammarVocabulary

        assert self._tokenizer is not None, "it has been looked for"
        token_bytes = [self._tokenizer.token_bytes(i) for i in range(self._vocab_size)]
        self._process = CompileProcess(token_bytes, self._stop_token_ids, self._timeout_s)
        self._vocabulary = XGrammarVocabulary(token_bytes, self._stop_token_ids)

    def _shrink(self) -> None:
        """Drops what was asked for longest ago."""
        sizes = [0 if isinstance(one, str) else one.num_bytes for one in self._cache.values()]
        num_bytes = sum(sizes)
        while len(self._cache) > 1 and (
            len(self._cache) > _MAX_CACHED or num_bytes > _MAX_CACHED_BYTES
        ):
            self._cache.popitem(last=False)
            num_bytes -= sizes.pop(0)
