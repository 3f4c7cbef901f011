"""Where each token came from, on the real engine, against windows counted by hand."""

import string
from functools import cache

import pytest

from outrider.entrypoints.output_processor import OutputProcessor
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.sampling_params import RequestOutputKind, SamplingParams
from tests.piece_tokenizer import piece_tokenizer
from tests.scripted_proposer import Drafter, Script, ScriptedProposer
from tests.tiny_engine import (
    VOCAB_SIZE,
    Job,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
)

K, LENGTH = 3, 12
PLAIN = ["plain"]
ALL_KEPT = ["accepted_1", "accepted_2", "accepted_3", "bonus"]
# One character a token.
TOKENIZER = piece_tokenizer(
    [char.encode() for char in (string.ascii_letters + string.digits)[:VOCAB_SIZE]]
)
model = cache(tiny_model)


@cache
def text() -> tuple[list[int], list[int]]:
    """A prompt, and a text whose seventh token, the second draft of a window, is new there."""
    for prompt in random_prompts([5] * 20, seed=4):
        output = decode_alone(model(), Job(prompt, greedy(LENGTH))).token_ids
        if output[6] not in output[:6]:
            return prompt, output
    raise AssertionError("no prompt has such a text")


def complete(script: str, params: SamplingParams, eos: int | None = None) -> CompletionOutput:
    """Decodes with drafts by a script of `Drafter`, none of them left off before the end."""
    prompt, output = text()
    drafter = Drafter([*prompt, *output, *[0] * K], VOCAB_SIZE)
    scripts: dict[str, Script] = {
        "perfect": drafter.perfect,
        "adversarial": drafter.adversarial,
        "second is wrong": drafter.one_error(2),
    }
    engine = make_engine(model(), K, TOKENIZER)
    if params.num_speculative_tokens != 0:
        engine.proposer = ScriptedProposer({"0-a": scripts[script]}, K, is_clipped=False)
    if eos is not None:
        engine.eos_token_ids = frozenset([eos])
    processor = OutputProcessor(engine)
    processor.add_request("a", EncodedPrompt(prompt), params)
    outputs: list[RequestOutput] = []
    while processor.request_ids:
        outputs += processor.process(engine.step())
    last = outputs[-1]
    assert last.metrics is not None
    (completion,) = last.outputs
    counted = last.metrics.spec_decode
    assert sum(step.num_draft_tokens for step in completion.steps) == counted.num_draft_tokens
    assert sum(step.num_accepted_tokens for step in completion.steps) == counted.num_accepted_tokens
    assert sum(step.num_tokens for step in completion.steps) == len(completion.token_ids)
    assert len(completion.steps) == counted.num_target_passes
    return completion


def sources(completion: CompletionOutput) -> list[list[str]]:
    return [step.token_sources for step in completion.steps]


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])
def test_the_cap_in_mid_run(kind: RequestOutputKind) -> None:
    completion = complete("perfect", greedy(7, output_kind=kind))
    # 1 + 4 + 2 tokens: there is room for two drafts, after which no bonus comes out.
    assert sources(completion) == [PLAIN, ALL_KEPT, ALL_KEPT[:2]]
    assert [step.num_draft_tokens for step in completion.steps] == [0, 3, 2]


def test_a_refused_draft_is_recovered() -> None:
    completion = complete("second is wrong", greedy(6))
    assert sources(completion) == [PLAIN, *[["accepted_1", "recovered"]] * 2, ["accepted_1"]]
    assert sources(complete("adversarial", greedy(4))) == [PLAIN, *[["recovered"]] * 3]


def test_the_end_of_sequence_in_mid_run() -> None:
    completion = complete("perfect", greedy(LENGTH, ignore_eos=False), eos=text()[1][6])
    assert completion.finish_reason == "stop"
    assert sources(completion) == [PLAIN, ALL_KEPT, ALL_KEPT[:2]]


def test_a_stop_string_in_mid_run() -> None:
    stop = TOKENIZER.decode(text()[1][6:7])
    completion = complete("perfect", greedy(LENGTH, stop=stop))
    assert completion.stop_reason == stop
    assert sources(completion) == [PLAIN, ALL_KEPT, ALL_KEPT[:2]]


def test_without_drafts_every_token_is_plain() -> None:
    completion = complete("perfect", greedy(5, num_speculative_tokens=0))
    assert sources(completion) == [PLAIN] * 5
