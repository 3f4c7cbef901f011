"""Users' requests beside the engine's: n completions each, logprobs, kinds of outputs, aborts."""

from typing import Any

import pytest

from outrider.entrypoints.llm import LLM
from outrider.entrypoints.output_processor import OutputProcessor, merge_outputs
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.errors import RequestError
from outrider.logprobs import Logprob, TokenLogprobs
from outrider.outputs import RequestOutput
from outrider.sampling_params import RequestOutputKind, SamplingParams
from outrider.tokenizer import Tokenizer
from tests.entrypoints.scripted_engine import ScriptedEngine, emit

PROMPT = EncodedPrompt([5, 6], "text")
KINDS = list(RequestOutputKind)


def start(
    tokenizer: Tokenizer, steps: list[Any], *params: SamplingParams
) -> tuple[OutputProcessor, ScriptedEngine]:
    """A processor with one request for each of `params`; their ids are letters from a on."""
    engine = ScriptedEngine(tokenizer, steps)
    processor = OutputProcessor(engine)  # type: ignore[arg-type]
    for name, one in zip("abcdef", params, strict=False):
        processor.add_request(name, PROMPT, one)
    return processor, engine


def run(processor: OutputProcessor, engine: ScriptedEngine) -> list[list[RequestOutput]]:
    """The outputs of each step."""
    return [processor.process(engine.step()) for _ in list(engine.steps)]


def test_a_request_runs_as_one_of_the_engine_for_each_completion(tokenizer: Tokenizer) -> None:
    seeded = SamplingParams(n=3, seed=7, prompt_logprobs=1)
    _, engine = start(tokenizer, [], seeded, SamplingParams())
    assert len(set(engine.added)) == 4
    assert [index for _, index in engine.choices] == [0, 1, 2, 0]
    assert [params.seed for params, _ in engine.choices] == [7, 7, 7, None]
    # One measurement of the prompt is enough.
    assert [params.prompt_logprobs for params, _ in engine.choices] == [1, None, None, None]


def test_no_ids_meet(tokenizer: Tokenizer) -> None:
    processor, engine = start(tokenizer, [])
    for name in ("a", "1-a", "0-a", "-a", "0-1-a", ""):
        processor.add_request(name, PROMPT, SamplingParams(n=2))
    assert len(set(engine.added)) == 12


def test_an_id_is_unique_until_its_request_is_finished(tokenizer: Tokenizer) -> None:
    steps = [[emit(0, [7], "length")], [emit(1, [7])]]
    processor, engine = start(tokenizer, steps, SamplingParams(n=2))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^request id 'a' is in use$"):
            processor.add_request("a", PROMPT, SamplingParams())
        processor.process(engine.step())
    assert len(engine.added) == 2
    assert processor.request_ids == ["a"]
    processor.abort_request("a")
    processor.add_request("a", PROMPT, SamplingParams())
    assert processor.request_ids == ["a"]


def scripted(tokenizer: Tokenizer) -> list[Any]:
    """Three steps of two completions: the second ends first, on a stop, the first on its cap."""
    a, b, c = (tokenizer.encode(text) for text in "abc")
    return [
        [emit(1, b + c, drafts=3, accepted=1), emit(0, a)],
        [emit(1, c, "stop", drafts=2, stop_reason=c[0]), emit(0, b + b, drafts=2, accepted=1)],
        [emit(0, c, "length", drafts=1, accepted=1)],
    ]


def seen(output: RequestOutput) -> list[tuple[int, str, str | None]]:
    return [(one.index, one.text, one.finish_reason) for one in output.outputs]


def windows_of(output: RequestOutput) -> list[list[tuple[int, int, int]]]:
    """Of each completion the tokens, drafts and accepted drafts of its steps."""
    return [
        [(step.num_tokens, step.num_draft_tokens, step.num_accepted_tokens) for step in one.steps]
        for one in output.outputs
    ]


# Of all steps that `scripted` writes down.
STEPS = [[(1, 0, 0), (2, 2, 1), (1, 1, 1)], [(2, 3, 1), (1, 2, 0)]]


def test_cumulative(tokenizer: Tokenizer) -> None:
    processor, engine = start(tokenizer, scripted(tokenizer), SamplingParams(n=2))
    outputs = [output for (output,) in run(processor, engine)]
    # Looked at only now: what was handed out has not changed since.
    assert [seen(output) for output in outputs] == [
        [(0, "a", None), (1, "bc", None)],
        [(0, "abb", None), (1, "bc", "stop")],
        [(0, "abbc", "length"), (1, "bc", "stop")],
    ]
    assert [[len(one.token_ids) for one in output.outputs] for output in outputs] == [
        [1, 2],
        [3, 3],
        [4, 3],
    ]
    assert [output.finished for output in outputs] == [False, False, True]
    assert windows_of(outputs[0]) == [[(1, 0, 0)], [(2, 3, 1)]]
    assert windows_of(outputs[-1]) == STEPS
    assert outputs[-1].outputs[1].stop_reason == tokenizer.encode("c")[0]
    assert {(o.request_id, o.prompt, *o.prompt_token_ids) for o in outputs} == {("a", "text", 5, 6)}
    assert processor.request_ids == []


def test_delta(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=2, output_kind=RequestOutputKind.DELTA)
    processor, engine = start(tokenizer, scripted(tokenizer), params)
    outputs = [output for (output,) in run(processor, engine)]
    assert [seen(output) for output in outputs] == [
        [(0, "a", None), (1, "bc", None)],
        [(0, "bb", None), (1, "", "stop")],
        [(0, "c", "length")],
    ]
    assert [windows_of(output) for output in outputs] == [
        [[(1, 0, 0)], [(2, 3, 1)]],
        [[(2, 2, 1)], [(1, 2, 0)]],
        [[(1, 1, 1)]],
    ]
    b, c = tokenizer.encode("b"), tokenizer.encode("c")
    assert [[one.token_ids for one in output.outputs] for output in outputs[1:]] == [
        [b + b, c],
        [c],
    ]
    assert [output.finished for output in outputs] == [False, False, True]


def test_final_only(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    processor, engine = start(tokenizer, scripted(tokenizer), params)
    first, second, (output,) = run(processor, engine)
    assert (first, second) == ([], [])
    assert seen(output) == [(0, "abbc", "length"), (1, "bc", "stop")]
    assert windows_of(output) == STEPS
    assert output.finished


def measured(token_id: int, logprob: float) -> TokenLogprobs:
    return TokenLogprobs([token_id, 8, 9], [logprob, -0.5, -2.0], 3)


def with_logprobs() -> list[Any]:
    return [
        [
            emit(0, [7], logprobs=[measured(7, -1.0)], prompt_logprobs=[None, measured(6, -4.0)]),
            emit(1, [8, 9], drafts=1, accepted=1, logprobs=[measured(8, -0.5), measured(9, -2.0)]),
        ],
        [
            emit(
                0,
                [9, 7],
                "length",
                drafts=2,
                accepted=1,
                logprobs=[measured(9, -2.0), measured(7, -1.5)],
            )
        ],
        [emit(1, [], "error", logprobs=[])],
    ]


def outputs_of_kind(tokenizer: Tokenizer, kind: RequestOutputKind) -> list[RequestOutput]:
    params = SamplingParams(n=2, logprobs=2, prompt_logprobs=2, output_kind=kind)
    return [one for step in run(*start(tokenizer, with_logprobs(), params)) for one in step]


@pytest.mark.parametrize("kind", KINDS)
def test_merged_outputs_are_the_whole(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    """Whatever neighbours a slow reader finds merged, no token is lost or told twice."""
    params = SamplingParams(n=2, logprobs=2, prompt_logprobs=2)
    whole = run(*start(tokenizer, with_logprobs(), params))[-1][0]
    outputs = outputs_of_kind(tokenizer, kind)
    merged = outputs[0]
    for output in outputs[1:]:
        merged = merge_outputs(merged, output, kind)
    assert merged.outputs == whole.outputs
    assert merged.prompt_logprobs == whole.prompt_logprobs
    assert (merged.finished, len(merged.outputs)) == (True, 2)
    assert [one.cumulative_logprob for one in merged.outputs] == [-4.5, -2.5]
    assert [len(one.logprobs or ()) for one in merged.outputs] == [3, 2]


def test_logprobs_as_users_read_them(tokenizer: Tokenizer) -> None:
    a, b, newline = (tokenizer.encode(text)[0] for text in ("a", "b", "\n"))
    half = tokenizer.encode("🎉")[0]
    end = tokenizer.eos_token_ids[0]
    positions = [
        # The chosen one beside the likeliest, and among them.
        TokenLogprobs([a, b, newline], [-3.0, -0.5, -1.0], 5),
        TokenLogprobs([newline, b, newline], [-1.0, -0.5, -1.0], 2),
        # Equals share the best rank.
        TokenLogprobs([b, end, half, b], [-1.0, -0.5, -1.0, -1.0], 2),
        TokenLogprobs([a], [-0.25], 1),
    ]
    step = [emit(0, [a, newline, b, a], "length", drafts=3, accepted=3, logprobs=positions)]
    processor, engine = start(tokenizer, [step], SamplingParams(logprobs=2))
    ((output,),) = run(processor, engine)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert [list(position.items()) for position in completion.logprobs] == [
        [
            (a, Logprob(-3.0, 5, "a")),
            (b, Logprob(-0.5, 1, "b")),
            (newline, Logprob(-1.0, 2, "\n")),
        ],
        [(newline, Logprob(-1.0, 2, "\n")), (b, Logprob(-0.5, 1, "b"))],
        [
            (b, Logprob(-1.0, 2, "b")),
            (end, Logprob(-0.5, 1, "<|endoftext|>")),
            (half, Logprob(-1.0, 2, "\ufffd")),
        ],
        [(a, Logprob(-0.25, 1, "a"))],
    ]
    assert completion.cumulative_logprob == -5.25


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_come_once_in_deltas_and_always_else(
    tokenizer: Tokenizer, kind: RequestOutputKind
) -> None:
    outputs = outputs_of_kind(tokenizer, kind)
    held = [output.prompt_logprobs is not None for output in outputs]
    expected = {
        RequestOutputKind.CUMULATIVE: [True, True, True],
        RequestOutputKind.DELTA: [True, False, False],
        RequestOutputKind.FINAL_ONLY: [True],
    }
    assert held == expected[kind]
    first = outputs[0].prompt_logprobs
    assert first is not None
    assert first[0] is None
    assert [list(position) for position in first[1:] if position is not None] == [[6, 8, 9]]


def test_without_logprobs_there_are_none(tokenizer: Tokenizer) -> None:
    processor, engine = start(tokenizer, scripted(tokenizer), SamplingParams(n=2))
    for (output,) in run(processor, engine):
        assert output.prompt_logprobs is None
        assert {one.logprobs for one in output.outputs} == {None}
        assert {one.cumulative_logprob for one in output.outputs} == {None}


def test_metrics_of_a_request_are_those_of_its_completions(tokenizer: Tokenizer) -> None:
    steps = scripted(tokenizer)
    steps[1].append(emit(2, [7], "length", drafts=3, accepted=0, num_fallbacks=1))
    processor, engine = start(tokenizer, steps, SamplingParams(n=2), SamplingParams())
    first, (second, other), last = run(processor, engine)
    assert other.metrics is not None
    assert (other.request_id, other.metrics.spec_decode.num_fallbacks) == ("b", 1)
    of_steps = [one.metrics for one in (*first, second, *last)]
    counts = [
        (m.spec_decode.num_drafts, m.spec_decode.num_draft_tokens, m.spec_decode.num_emitted_tokens)
        for m in of_steps
        if m is not None
    ]
    assert counts == [(1, 3, 3), (3, 7, 6), (4, 8, 7)]
    assert of_steps[-1] is not None
    assert of_steps[-1].spec_decode.num_accepted_tokens_per_pos == [3, 0, 0]
    times = [(m.arrival_time, m.first_token_time, m.finished_time) for m in of_steps if m]
    assert times[0][2] is times[1][2] is None
    arrival, first_token, finished = times[2]
    assert first_token is not None
    assert finished is not None
    assert arrival <= first_token <= finished
    assert times[0][:2] == times[2][:2]


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_drops_all_completions(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    params = SamplingParams(n=3, output_kind=kind)
    steps = [[emit(0, tokenizer.encode("a"), "length"), emit(1, tokenizer.encode("b"))]]
    processor, engine = start(tokenizer, steps, params, SamplingParams())
    processor.process(engine.step())
    output = processor.abort_request("a")
    assert output is not None
    assert output.finished
    ends = {0: ("a", "length"), 1: ("b", "abort"), 2: ("", "abort")}
    if kind == RequestOutputKind.DELTA:
        ends = {1: ("", "abort"), 2: ("", "abort")}
    assert {one.index: (one.text, one.finish_reason) for one in output.outputs} == ends
    told = [[], []] if kind == RequestOutputKind.DELTA else [[(1, 0, 0)], [(1, 0, 0)], []]
    assert windows_of(output) == told
    assert engine.aborted == engine.added[1:3]
    assert processor.request_ids == ["b"]
    assert processor.abort_request("a") is None
    assert processor.abort_request("never") is None
    assert len(engine.aborted) == 2


@pytest.mark.parametrize("error", [RequestError("no"), KeyboardInterrupt(), MemoryError()])
def test_adding_is_all_or_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    processor, engine = start(tokenizer, [])
    add = engine.add_request

    def fail_at_the_third(*args: Any) -> None:
        if args[3] == 2:
            raise error
        add(*args)

    monkeypatch.setattr(engine, "add_request", fail_at_the_third)
    with pytest.raises(type(error)):
        processor.add_request("a", PROMPT, SamplingParams(n=4))
    assert processor.request_ids == []
    assert set(engine.added) <= set(engine.aborted)
    processor.add_request("a", PROMPT, SamplingParams(n=2))


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_brings_the_text_that_was_held_back(llm: LLM, kind: RequestOutputKind) -> None:
    """All of the text might begin the stop string, so that nothing is shown before."""
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    prompt = EncodedPrompt(tokenizer.encode("def f(x):"))
    plain = llm.generate(
        [{"prompt_token_ids": prompt.token_ids}], SamplingParams(max_tokens=12, **greedy)
    )
    text = plain[0].outputs[0].text
    assert text
    params = SamplingParams(max_tokens=12, stop=f"{text}~", output_kind=kind, **greedy)
    processor = OutputProcessor(engine)
    processor.add_request("a", prompt, params)
    for _ in range(4):
        for output in processor.process(engine.step()):
            assert output.outputs[0].text == ""
    last = processor.abort_request("a")
    assert last is not None
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("abort", None)
    shown = last.outputs[0].text
    assert shown
    assert text.startswith(shown.rstrip("\ufffd"))
    if kind != RequestOutputKind.DELTA:
        assert shown == tokenizer.decode(last.outputs[0].token_ids)
    assert not engine.has_unfinished_requests()
