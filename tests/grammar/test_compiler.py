"""What compiles grammars: a cache in front, and a process that is ended at its deadline."""

import threading
import time
from typing import Any

import pytest

from outrider.errors import RequestError
from outrider.grammar.compile_process import CompilerGoneError
from outrider.grammar.compiler import GrammarCompiler
from outrider.structured_outputs import StructuredOutputsParams
from outrider.tokenizer import Tokenizer
from tests.grammar.toy_grammar import ids_of
from tests.piece_tokenizer import piece_tokenizer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "(?=a)b"}, "regex has a group of this kind at character 0"),
        ({"regex": r"\bq"}, r"regex has \\b at character 1"),
        ({"regex": "a|b$"}, r"regex has \$ behind alternatives"),
        ({"regex": "((a{1,90}b){9}){1,900}"}, "regex has counts that make more than 100,000"),
        ({"regex": "(a"}, "regex has a parenthesis that nothing closes"),
        ({"regex": "[a"}, "regex has a bracket that nothing closes"),
        ({"grammar": "root ::= foo"}, 'Rule "foo" is not defined'),
        ({"grammar": "root ::= root"}, "there is no text that it allows"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum greater than max"),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "Nest layer exceeded"),
        ({"structural_tag": {"type": "bogus"}}, "Format type not recognized: bogus"),
    ],
)
def test_what_cannot_compile(
    compiler: GrammarCompiler, given: dict[str, Any], message: str
) -> None:
    params = StructuredOutputsParams(**given)
    with pytest.raises(RequestError, match=message) as caught:
        compiler.compile(params)
    assert str(caught.value).startswith("structured_outputs")
    assert "/project/" not in str(caught.value)
    # It is remembered, and what is right compiles after it.
    with pytest.raises(RequestError, match=message):
        compiler.compile(params)
    compiler.compile(StructuredOutputsParams(regex="ab"))


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(StructuredOutputsParams(json={"type": "integer"}))
    assert compiler.compile(StructuredOutputsParams(json='{"type":"integer"}')) is first
    assert compiler.compile(StructuredOutputsParams(json={"type": "null"})) is not first


def test_what_is_held_needs_no_compiler(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for a compiler before it reaches the engine, and never there."""
    params = StructuredOutputsParams(choice=["held"])
    held = compiler.submit(params).result(timeout=60)
    compiler._cache.clear()
    monkeypatch.setattr(compiler, "_compile", None)
    assert compiler.compile(params) is held
    assert compiler.path(params).allowed_after([], 0) is not None


def test_the_cache_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.grammar.compiler._MAX_CACHED", 3)
    for number in range(6):
        compiler.compile(StructuredOutputsParams(regex=f"a{number}"))
    assert [params.regex for params in compiler._cache] == ["a3", "a4", "a5"]
    monkeypatch.setattr("outrider.grammar.compiler._MAX_CACHED_BYTES", 1)
    compiler.compile(StructuredOutputsParams(regex="b"))
    assert [params.regex for params in compiler._cache] == ["b"]


def test_a_deadline_ends_the_process_and_nothing_else() -> None:
    """Whatever takes longer than the deadline is refused, and what comes after it compiles."""
    tokenizer = piece_tokenizer([bytes([value]) for value in range(128)], ["<eos>"], [128])
    compiler = GrammarCompiler(tokenizer, 129, [128], timeout_s=0.05)
    slow = StructuredOutputsParams(json={"enum": [f"{i:032d}" for i in range(1_500)]})
    with pytest.raises(RequestError, match=r"takes longer than 0\.05 s"):
        compiler.compile(slow)
    assert compiler._process is not None
    assert compiler._process._process is None, "the process was ended"
    compiler._process._timeout_s = 30.0
    assert compiler.path(StructuredOutputsParams(choice=["a"])).num_allowed([], 0, [97, 128]) == 2
    process = compiler._process._process
    assert process is not None
    process.kill()
    process.wait()
    # What it was not asked is nobody's fault, and is compiled by the next one.
    compiler.compile(StructuredOutputsParams(choice=["b"]))
    compiler.close()
    assert process.poll() is not None


def test_what_a_missing_compiler_says_is_not_remembered(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(StructuredOutputsParams(regex="a"))
    assert compiler._process is not None
    process, params = compiler._process._process, StructuredOutputsParams(regex="b+")
    assert process is not None
    assert process.stdin is not None
    # It goes between the look at it and the question.
    process.kill()
    process.wait()
    monkeypatch.setattr(process, "poll", lambda: None)
    with pytest.raises(CompilerGoneError, match="cannot be compiled: the compiler has ended"):
        compiler.compile(params)
    monkeypatch.setattr("outrider.grammar.compile_process._PROGRAM", "raise SystemExit")
    with pytest.raises(CompilerGoneError, match="cannot be compiled: the compiler does not start"):
        compiler.compile(params)
    monkeypatch.undo()
    assert compiler.compile(params) is compiler.compile(params)


def test_requests_wait_beside_one_another(compiler: GrammarCompiler) -> None:
    """Threads that want the same thing compile it once, and all get it."""
    params, found = StructuredOutputsParams(regex="[0-9]{3}x"), list[object]()
    threads = [
        threading.Thread(target=lambda: found.append(compiler.compile(params))) for _ in range(8)
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - start < 60
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_to_ask_never_waits(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop asks while another grammar is being compiled, for as long as that takes."""
    is_open, compile_one = threading.Event(), compiler._compile

    def slow(params: StructuredOutputsParams) -> object:
        assert is_open.wait(60)
        return compile_one(params)

    monkeypatch.setattr(compiler, "_compile", slow)
    asked: list[Any] = []

    def ask() -> None:
        asked.extend(compiler.submit(StructuredOutputsParams(regex=f"w{i}")) for i in range(3))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    has_waited = thread.is_alive()
    is_open.set()
    thread.join(60)
    assert not has_waited
    assert not any(future.result(timeout=60).num_bytes == 0 for future in asked)


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_without_an_end_or_a_tokenizer_there_are_no_grammars(
    tokenizer: Tokenizer, has_tokenizer: bool
) -> None:
    compiler = GrammarCompiler(tokenizer if has_tokenizer else None, 4096, [4096])
    with pytest.raises(RequestError, match="needs a tokenizer with an end-of-sequence token"):
        compiler.check_available()


def test_without_the_library_there_are_no_grammars(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.grammar.compiler.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'outrider\[server\]'"):
        compiler.check_available()


def test_an_ambiguous_grammar_uses_up_its_budget(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes longer with each token; a grammar that says the same plainly does not."""
    monkeypatch.setattr("outrider.grammar.grammar_path.BUDGET_S", 0.1)
    monkeypatch.setattr("outrider.grammar.grammar_path.BUDGET_PER_TOKEN_S", 0.0)
    ambiguous = compiler.path(StructuredOutputsParams(grammar='root ::= root root | "a"'))
    plain = compiler.path(StructuredOutputsParams(grammar='root ::= "a" root | "a"'))
    text: list[int] = []
    while not ambiguous.is_stuck:
        mask = ambiguous.allowed_after(text, len(text))
        expected = plain.allowed_after(text, len(text))
        assert mask is not None
        assert expected is not None
        if not ambiguous.is_stuck:
            assert (mask == expected).all()
            text.append(min((ids_of(mask) or set()) - set(compiler._stop_token_ids)))
        assert len(text) < 2_000
    assert not plain.is_stuck
