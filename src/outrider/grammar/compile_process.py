"""The other end of the program that compiles grammars: starts, asks, and ends it at a deadline."""

from __future__ import annotations

import base64
import json
import os
import re
import selectors
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of the library, which is read from a disk that may be slow.
_START_TIMEOUT_S = 300.0
# Characters of a compiled grammar.
_MAX_ANSWER_LENGTH = 64 << 20
_CHUNK_SIZE = 1 << 20
# Where in its own source the library found an error.
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
# The folder that this package is imported from, so that the program is of the same version.
_PROGRAM = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from outrider.grammar.compile_worker import main; main()"
)


class CompilerGoneError(RequestError):
    """The program is not there to be asked, which says nothing of the grammar."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"structured_outputs cannot be compiled: {reason}")


class _GoneError(Exception):
    """The program does not answer, and why."""


class CompileProcess:
    """Compiles grammars, one after the other; started when first needed, and again after an end.

    Args:
        token_bytes: of each id of the model.
        stop_token_ids: ids that end a text.
        timeout_s: seconds for one grammar.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], stop_token_ids: Sequence[int], timeout_s: float
    ) -> None:
        self._vocabulary = {
            "token_bytes": [base64.b64encode(token).decode() for token in token_bytes],
            "stop_token_ids": list(stop_token_ids),
        }
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, structural_tag: dict[str, Any]) -> str:
        """The compiled grammar as text. For one thread at a time.

        Raises:
            CompilerGoneError: the program does not start, or has just ended.
            RequestError: the grammar cannot be compiled, or not within the limits.
        """
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # It has ended with nothing to do.
        if self._process is None:
            self._start()
        try:
            answer = self._ask(structural_tag, self._timeout_s)
        except CompilerGoneError:
            self.stop()
            raise
        except _GoneError as error:
            self.stop()
            raise RequestError(f"structured_outputs cannot be compiled: {error}") from None
        if "error" in answer:
            reason = " ".join(_SOURCE_PLACE.sub("", answer["error"]).split())
            raise RequestError(f"structured_outputs cannot be compiled: {reason[:500]}")
        compiled: str = answer["compiled"]
        return compiled

    def stop(self) -> None:
        """Ends the program, whatever it does; nothing of one that does not run."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)

    def _start(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        # At the end of this object or of the interpreter; the program also ends with its stdin.
        weakref.finalize(self, _kill, process)
        try:
            self._ask(self._vocabulary, _START_TIMEOUT_S)
        except (CompilerGoneError, _GoneError):
            self.stop()
            raise CompilerGoneError("the compiler does not start") from None

    def _ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None, "the program has been started"
        assert process.stdin is not None, "it has a pipe for questions"
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            raise CompilerGoneError("the compiler has ended") from None
        answer: dict[str, Any] = json.loads(_read_line(process, timeout_s))
        return answer


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """What the program writes up to the next line feed."""
    assert process.stdout is not None, "the program has a pipe for answers"
    deadline = time.monotonic() + timeout_s
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not data.endswith(b"\n"):
            if not selector.select(max(deadline - time.monotonic(), 0)):
                raise _GoneError(f"it takes longer than {timeout_s:g} s")
            chunk = os.read(process.stdout.fileno(), _CHUNK_SIZE)
            if not chunk:
                raise _GoneError("it takes too much memory, or is nested too deep")
            data += chunk
            if len(data) > _MAX_ANSWER_LENGTH:
                raise _GoneError("the compiled grammar is too large")
    return bytes(data)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # What was not written yet finds nobody.
            with suppress(OSError):
                pipe.close()
