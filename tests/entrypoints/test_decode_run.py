"""The loop around the step: text as it becomes certain, figures, and nothing left behind."""

from typing import Any

import pytest

from outrider.entrypoints.decode_run import DecodeRun, DecodeSpeed
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.errors import RequestError
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer
from tests.entrypoints.scripted_engine import ScriptedEngine, emit

PARAMS = SamplingParams()


def prompts(number: int) -> list[EncodedPrompt]:
    return [EncodedPrompt([5, 6], f"text {i}", f"prompts[{i}]") for i in range(number)]


def test_results_and_pieces_in_the_order_of_the_prompts(tokenizer: Tokenizer) -> None:
    a, party, b = (tokenizer.encode(text) for text in ("a", "🎉", "b"))
    steps: list[Any] = [
        [emit(1, b), emit(0, a)],
        [],
        [emit(0, party[:3], drafts=3, accepted=2)],
        [
            emit(0, party[3:] + a, "length", drafts=2, accepted=1),
            emit(1, party[:2], "length", drafts=1, accepted=1),
        ],
    ]
    engine = ScriptedEngine(tokenizer, steps)
    pieces: list[tuple[int, str]] = []
    ended: list[int] = []
    run = DecodeRun(engine, lambda i, text: pieces.append((i, text)), ended.append)  # type: ignore[arg-type]
    results = run.run(prompts(2), [PARAMS] * 2)
    assert [result.prompt for result in results] == ["text 0", "text 1"]
    assert [result.prompt_token_ids for result in results] == [[5, 6]] * 2
    assert all(result.finished for result in results)
    outputs = [result.outputs[0] for result in results]
    assert [output.text for output in outputs] == ["a🎉a", "b\ufffd"]
    assert [output.token_ids for output in outputs] == [[*a, *party, *a], [*b, *party[:2]]]
    assert [output.finish_reason for output in outputs] == ["length", "length"]
    assert pieces == [(1, "b"), (0, "a"), (0, "🎉a"), (1, "\ufffd")]
    assert ended == [0, 1]
    assert engine.aborted == []
    assert run.stats() == {
        "num_drafts": 3,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 4,
        "num_accepted_tokens_per_pos": [3, 1, 0],
        "mean_acceptance_length": 1 + 4 / 3,
        "acceptance_rate": 4 / 6,
        "tokens_per_target_pass": 9 / 5,
        "decode_tokens_per_s": run.speed.tokens_per_s,
    }
    # The first step holds first tokens; the second emitted nothing.
    assert run.speed.num_tokens == 7


def test_of_several_completions_the_first_is_told(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    steps: list[Any] = [
        [emit(0, a), emit(2, b)],
        [emit(1, b), emit(0, a), emit(2, b)],
        [emit(0, a, "length"), emit(1, b)],
        [emit(2, a, "length"), emit(1, b, "length")],
    ]
    engine = ScriptedEngine(tokenizer, steps)
    pieces: list[tuple[int, str]] = []
    ended: list[tuple[int, int]] = []
    run = DecodeRun(
        engine,  # type: ignore[arg-type]
        lambda i, text: pieces.append((i, text)),
        lambda i: ended.append((i, len(engine.steps))),
    )
    params = [SamplingParams(n=2, output_kind="delta"), SamplingParams(output_kind="delta")]  # type: ignore[arg-type]
    first, second = run.run(prompts(2), params)
    assert pieces == [(0, "a"), (1, "b"), (0, "a"), (1, "b"), (0, "a"), (1, "a")]
    # A prompt has ended with the last of its completions.
    assert sorted(ended) == [(0, 0), (1, 0)]
    # Results are whole, whatever kind of output was asked for.
    assert [one.text for one in first.outputs] == ["aaa", "bbb"]
    assert [one.text for one in second.outputs] == ["bba"]
    # The second step holds the first token of the second completion.
    assert run.speed.num_tokens == 4
    assert run.metrics.num_emitted_tokens == 9


def test_the_stop_token_is_no_text(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    last = emit(0, a + b, "stop", drafts=1, accepted=1, stop_reason=b[0])
    engine = ScriptedEngine(tokenizer, [[emit(0, a)], [last]])
    (result,) = DecodeRun(engine).run(prompts(1), [PARAMS])  # type: ignore[arg-type]
    output = result.outputs[0]
    assert (output.text, output.token_ids) == ("aa", a + a + b)
    assert (output.finish_reason, output.stop_reason) == ("stop", b[0])


def test_a_broken_request_ends_with_what_it_had(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, [[emit(0, tokenizer.encode("a"))], [emit(0, [], "error")]])
    (result,) = DecodeRun(engine).run(prompts(1), [PARAMS])  # type: ignore[arg-type]
    assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("a", "error")


def test_one_bad_prompt_and_nothing_is_added(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, [])
    bad = [*prompts(2), EncodedPrompt([9], None, "prompts[2]")]
    with pytest.raises(RequestError, match=r"^prompts\[2\]: refused$"):
        DecodeRun(engine).run(bad, [PARAMS] * 3)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^refused$"):
        DecodeRun(engine).run([EncodedPrompt([9])], [PARAMS])  # type: ignore[arg-type]
    assert engine.added == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_end_from_outside_aborts_what_is_left(
    tokenizer: Tokenizer, error: BaseException
) -> None:
    engine = ScriptedEngine(tokenizer, [[emit(0, [7], "length"), emit(1, [7])], error])
    with pytest.raises(type(error)):
        DecodeRun(engine).run(prompts(2), [PARAMS] * 2)  # type: ignore[arg-type]
    assert engine.aborted == engine.added[1:]


def test_no_prompts(tokenizer: Tokenizer) -> None:
    run = DecodeRun(ScriptedEngine(tokenizer, []))  # type: ignore[arg-type]
    assert run.run([], []) == []
    assert run.stats()["decode_tokens_per_s"] == 0


def test_speed_counts_steps_that_only_decode() -> None:
    speed = DecodeSpeed()
    speed.observe(num_tokens=5, seconds=9.0, has_prompt=True)
    speed.observe(num_tokens=0, seconds=9.0, has_prompt=False)
    assert speed.tokens_per_s == 0
    speed.observe(num_tokens=3, seconds=0.5, has_prompt=False)
    speed.observe(num_tokens=1, seconds=0.5, has_prompt=False)
    assert (speed.num_tokens, speed.seconds, speed.tokens_per_s) == (4, 1.0, 4.0)


def test_steps_with_rows_of_a_prompt_are_no_decoding(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, [[emit(0, [7])], [emit(0, [7])], [emit(0, [7], "length")]])
    engine.scheduler.has_prompt_rows = True
    run = DecodeRun(engine)  # type: ignore[arg-type]
    run.run(prompts(1), [PARAMS])
    assert run.speed.num_tokens == 0
