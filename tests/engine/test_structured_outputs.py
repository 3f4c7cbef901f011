"""Outputs that follow a grammar, by the whole engine over a tiny model of every kind of state.

In float64 the text with drafts is that of plain decoding under the same grammar, token for token:
at temperature 0 and under `coupled`, whoever drafts, wherever thoughts or the text end in a run.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.engine import LLMEngine
from outrider.errors import RequestError
from outrider.grammar.compiler import GrammarCompiler
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.sampling_params import SamplingParams
from outrider.structured_outputs import GRAMMAR_STUCK, StructuredOutputsParams
from outrider.tokenizer import Tokenizer
from tests.piece_tokenizer import piece_tokenizer
from tests.scripted_proposer import Drafter, ScriptedProposer
from tests.tiny_engine import (
    VOCAB_SIZE,
    Decoded,
    Job,
    decode,
    make_engine,
    random_prompts,
    tiny_model,
)

WORDS = [
    b"</think>",
    b"<think>",
    b'{"',
    b'":',
    b'"city"',
    b'","',
    b'"}',
    b"\n\n",
    b'{"city":"',
    b"Oslo",
]
CHARS = [bytes([char]) for char in b'{}[]":, \n0123456789-abcdefghijklmnopqrstuvwxOsln.'[:49]]
PIECES = [*WORDS, *dict.fromkeys(CHARS)]
PIECES += [bytes([char, char]) for char in b"ABCDEFGHIJKLMNOPQRSTUVW"][
    : VOCAB_SIZE - 1 - len(PIECES)
]
EOS = len(PIECES)
THINK_END = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "bonn"]},
        "n": {"type": "integer", "minimum": -20, "maximum": 99},
        "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["city", "n"],
}
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "compact": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": "([a-f]{2}-?){1,6}[0-9]"},
    "choice": {"choice": ["abc", "abcdef", "Oslo", "a"]},
    "grammar": {"grammar": 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]{1,3} | root'},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    assert len(PIECES) == VOCAB_SIZE - 1
    return piece_tokenizer(PIECES, special=["<eos>"], eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def model() -> Qwen4ExpForCausalLM:
    return tiny_model(eos_token_id=EOS)


@pytest.fixture
def engine_of(model: Qwen4ExpForCausalLM, tokenizer: Tokenizer, compiler: GrammarCompiler) -> Any:
    """Makes engines that share the compiler."""

    def make(k: int = 0, **options: Any) -> LLMEngine:
        engine = make_engine(model, k, tokenizer, **options)
        engine.grammars = compiler
        return engine

    return make


def jobs_of(
    params: dict[str, Any], temperature: float = 0, count: int = 3, **more: Any
) -> list[Job]:
    sampling = SamplingParams(
        temperature=temperature,
        max_tokens=60,
        rejection_sample_method="coupled",
        structured_outputs=StructuredOutputsParams(**params),
        **more,
    )
    prompts = random_prompts([5, 9, 14][:count])
    return [Job(prompt, replace(sampling, seed=i)) for i, prompt in enumerate(prompts)]


def texts(results: Sequence[Decoded]) -> list[tuple[list[int], str | None, str]]:
    return [(result.token_ids, result.finish_reason, result.text) for result in results]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_nothing(engine_of: Any, kind: str, temperature: float) -> None:
    jobs = jobs_of(KINDS[kind], temperature)
    plain = decode(engine_of(), jobs)
    for k in (1, 3, 6):
        drafted = decode(engine_of(k), jobs)
        assert texts(drafted) == texts(plain)
        assert sum(window[1] for result in drafted for window in result.windows) > 0
    for result in plain:
        if result.finish_reason == "stop":
            assert result.token_ids[-1] == EOS
    if kind in ("json", "compact"):
        whole = [json.loads(result.text) for result in plain if result.finish_reason == "stop"]
        # At temperature 1 a model without sense writes blanks where it may.
        assert whole or (temperature and kind == "json"), "some outputs come to their end"
        assert all(one["city"] in ("Oslo", "bonn") and -20 <= one["n"] <= 99 for one in whole)


def test_whoever_drafts(engine_of: Any) -> None:
    jobs = jobs_of(KINDS["json"])
    plain = decode(engine_of(), jobs)
    drafters = [
        Drafter([*job.prompt, *one.token_ids], VOCAB_SIZE)
        for job, one in zip(jobs, plain, strict=True)
    ]
    for name in ("perfect", "adversarial", "random", "moving_error", "placeholders"):
        engine = engine_of(4)
        scripts = {str(i): getattr(drafter, name) for i, drafter in enumerate(drafters)}
        engine.proposer = ScriptedProposer(scripts, 4)
        assert texts(decode(engine, jobs)) == texts(plain), name
    engine = engine_of(4, method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    assert texts(decode(engine, jobs)) == texts(plain)


@pytest.mark.parametrize("kind", ["json", "regex", "choice"])
def test_thoughts_end_at_each_place_of_a_run(engine_of: Any, kind: str) -> None:
    """The end of the thoughts, the first token of the text, then a draft that is not of it."""
    params = {**KINDS[kind], "reasoning": "open"}
    jobs = [
        replace(job, params=replace(job.params, logit_bias={THINK_END: 2.5}, seed=seed))
        for job in jobs_of(params, 1, count=1)
        for seed in range(6)
    ]
    plain = decode(engine_of(), jobs)
    ends = [one.token_ids.index(THINK_END) for one in plain if THINK_END in one.token_ids]
    assert len(set(ends)) > 1, "thoughts of several lengths"
    places = set()
    for k in (2, 4):
        for job, expected in zip(jobs, plain, strict=True):
            if THINK_END not in expected.token_ids:
                continue
            drafter = Drafter([*job.prompt, *expected.token_ids], VOCAB_SIZE)
            place = len(job.prompt) + expected.token_ids.index(THINK_END)

            def script(
                text: list[int], length: int, d: Drafter = drafter, p: int = place
            ) -> list[int]:
                drafts = d.perfect(text, length)
                if 0 <= p - len(text) < len(drafts):
                    places.add(p - len(text))
                    # What follows the first token of the text is nothing that the grammar knows.
                    drafts[p - len(text) + 2 :] = [WORDS.index(b"<think>")] * len(drafts)
                return drafts[:length]

            engine = engine_of(k)
            engine.proposer = ScriptedProposer({"0": script}, k)
            (got,) = decode(engine, [job])
            assert texts([got]) == texts([expected])
            said = got.text.partition("</think>")[2].lstrip("\n")
            if kind == "json" and got.finish_reason == "stop":
                assert json.loads(said)["city"] in ("Oslo", "bonn")
            if kind == "choice" and got.finish_reason == "stop":
                assert said in KINDS["choice"]["choice"]
    assert places >= {0, 1, 2, 3}


def test_the_end_wins_over_what_else_is_asked(engine_of: Any) -> None:
    """Over min_tokens, ignore_eos and a bad word that leaves nothing."""
    jobs = jobs_of({"choice": ["abc"]}, min_tokens=20, ignore_eos=True, bad_words=["abc", "c"])
    for k in (0, 3):
        for result in decode(engine_of(k), jobs):
            assert (result.text, result.finish_reason) == ("abc", "stop")
            assert result.token_ids[-1] == EOS


def test_where_nothing_may_follow_the_request_ends_alone(engine_of: Any) -> None:
    stuck = jobs_of({"grammar": 'root ::= "a" b\nb ::= b "x"'}, count=1)
    others = [
        Job(job.prompt, replace(job.params, structured_outputs=None))
        for job in jobs_of({"regex": "a"})
    ]
    plain = decode(engine_of(), others)
    for k in (0, 3):
        first, *rest = decode(engine_of(k), [*stuck, *others])
        assert (first.finish_reason, first.stop_reason) == ("error", GRAMMAR_STUCK)
        assert first.text == "a"
        assert texts(rest) == texts(plain)


def test_requests_that_give_way_come_back_to_the_same_text(engine_of: Any) -> None:
    jobs = jobs_of({"regex": "[a-f]{40,50}"}, 1)
    plain = decode(engine_of(), jobs)
    bytes_per_block = engine_of(3).cache_plan.bytes_per_block
    engine = engine_of(3, kv_cache_memory=16 * bytes_per_block)
    assert texts(decode(engine, jobs)) == texts(plain)
    assert engine.scheduler.num_preemptions > 0


def test_a_failed_step_leaves_no_trace(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that it drafted and emitted are taken back, and others come."""
    jobs = jobs_of(KINDS["json"], 1)
    plain = decode(engine_of(), jobs)
    engine = engine_of(3)
    update, failures = engine.scheduler.update, [2, 3, 5]

    def failing(*args: Any) -> Any:
        if engine.num_steps in failures:
            failures.remove(engine.num_steps)
            raise OSError("a failure")
        return update(*args)

    monkeypatch.setattr(engine.scheduler, "update", failing)
    step = engine.step

    def stubborn() -> Any:
        try:
            return step()
        except OSError:
            return []

    monkeypatch.setattr(engine, "step", stubborn)
    assert texts(decode(engine, jobs)) == texts(plain)
    assert not failures


def test_log_probabilities_are_of_the_masked_law(engine_of: Any) -> None:
    jobs = jobs_of({"choice": ["abc"]}, 1, count=1, logprobs=2)
    engine = engine_of(3, logprobs_mode="processed_logprobs")
    (result,) = decode(engine, jobs)
    # Of some spellings of the text one was chosen at each place; where one is left it is certain.
    assert result.logprobs[-1].logprobs[0] == 0.0
    (raw,) = decode(engine_of(3), jobs)
    assert raw.token_ids == result.token_ids
    assert raw.logprobs[-1].logprobs[0] < 0.0


def test_an_engine_without_a_tokenizer_says_so(model: Qwen4ExpForCausalLM) -> None:
    engine = make_engine(model)
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        engine.add_request("a", [1, 2], jobs_of({"regex": "a"})[0].params)
