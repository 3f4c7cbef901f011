"""The program that compiles grammars: lines of JSON on stdin, an answer to each on stdout.

It is a process of its own, since what a client wrote may take the library without end, or take all
memory, or end it. Whoever started it reads the answers, and ends it at a deadline.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.grammar.structural_tag import COMPACT_JSON

if TYPE_CHECKING:
    from typing import TextIO

# Bytes that one grammar may take beyond what the library itself does.
_MAX_MEMORY_BYTES = 2 << 30
_NUM_FIRST_STEPS = 16


def main() -> None:
    """Compiles until stdin ends. The first line names the vocabulary."""
    # What the library prints must not come between the answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _serve(sys.stdin, answers)


def _serve(questions: TextIO, answers: TextIO) -> None:
    import xgrammar

    vocabulary = json.loads(questions.readline())
    tokenizer_info = xgrammar.TokenizerInfo(
        [base64.b64decode(token) for token in vocabulary["token_bytes"]],
        xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary["token_bytes"]),
        stop_token_ids=vocabulary["stop_token_ids"],
    )
    compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=1, cache_enabled=False)
    _limit_memory()
    _answer(answers, {"is_ready": True})
    for line in questions:
        _answer(answers, _compile(compiler, json.loads(line)))


def _compile(compiler: Any, structural_tag: dict[str, Any]) -> dict[str, str]:
    try:
        tag = _without_compact_json(structural_tag)
        compiled = compiler.compile_structural_tag(tag)
        _take_first_steps(compiled)
        return {"compiled": compiled.serialize_json()}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _take_first_steps(compiled: Any) -> None:
    """Follows the grammar a little, so that one that takes without end does so here."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    for _ in range(_NUM_FIRST_STEPS):
        matcher.fill_next_token_bitmask(bitmask)
        allowed = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")
        token_ids = np.flatnonzero(allowed)
        if not len(token_ids) or not matcher.accept_token(int(token_ids[0])):
            return
        if matcher.is_terminated():
            return


def _without_compact_json(value: Any) -> Any:
    """A tag in which JSON without white space is written out as a grammar."""
    if isinstance(value, list):
        return [_without_compact_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") != COMPACT_JSON:
        return {name: _without_compact_json(one) for name, one in value.items()}
    import xgrammar

    schema = json.dumps(value["json_schema"])
    grammar = xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, separators=(",", ":"))
    # Of what the schema leaves open, the library takes other separators.
    text = str(grammar).replace('((", " basic_', '(("," basic_')
    return {"type": "grammar", "grammar": text}


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _limit_memory() -> None:
    """Makes a grammar that takes too much fail, before it takes what the engine needs."""
    try:
        with open("/proc/self/statm") as file:
            num_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        # Not Linux: the deadline is the only limit.
        return
    limit = num_bytes + _MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
