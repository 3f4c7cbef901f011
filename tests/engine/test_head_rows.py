"""How many rows the head runs: those of requests that can still draft, and no others."""

from typing import Any

import pytest

from outrider.models.qwen4_exp.mtp import MultiTokenPredictor
from tests.tiny_engine import Job, decode, greedy, make_engine, random_prompts, tiny_model


@pytest.fixture
def num_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the rows of each pass of the head."""
    rows: list[int] = []
    forward = MultiTokenPredictor.forward

    def counting(self: MultiTokenPredictor, streams: Any, *args: Any) -> Any:
        rows.append(streams.shape[0])
        return forward(self, streams, *args)

    monkeypatch.setattr(MultiTokenPredictor, "forward", counting)
    return rows


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 9, "num_speculative_tokens": 0}],
)
def test_none_for_a_request_that_never_drafts(num_rows: list[int], options: dict[str, int]) -> None:
    (prompt,) = random_prompts([20])
    engine = make_engine(tiny_model(), 3, max_num_batched_tokens=8, enable_prefix_caching=False)
    decode(engine, [Job(prompt, greedy(**options))])
    assert num_rows == []


@pytest.mark.parametrize(
    ("length", "engine_options", "options", "expected"),
    [
        # Two whole blocks are left to others; of the third they get nothing.
        (20, {}, {"max_tokens": 1}, [8, 8]),
        (23, {}, {"max_tokens": 1}, [8, 8]),
        (24, {}, {"max_tokens": 1}, [8, 8, 8]),
        (24, {}, {"max_tokens": 9, "num_speculative_tokens": 0}, []),
        # Past its limit the head does not run, for nobody.
        (24, {"drafter_max_model_len": 24}, {"max_tokens": 1}, []),
    ],
)
def test_those_of_whole_blocks_for_others(
    num_rows: list[int],
    length: int,
    engine_options: dict[str, int],
    options: dict[str, int],
    expected: list[int],
) -> None:
    """In an engine that keeps what was run: the head follows to the end of the last whole block."""
    (prompt,) = random_prompts([length])
    engine = make_engine(tiny_model(), 3, max_num_batched_tokens=8, **engine_options)
    decode(engine, [Job(prompt, greedy(**options))])
    assert num_rows == expected


def test_none_once_a_request_has_ended(num_rows: list[int]) -> None:
    """It ends with its first token: the prompt may have been followed, the end is not."""
    (prompt,) = random_prompts([5])
    (plain,) = decode(make_engine(tiny_model()), [Job(prompt, greedy(1))])
    params = greedy(20, stop_token_ids=plain.token_ids)
    (result,) = decode(make_engine(tiny_model(), 3), [Job(prompt, params)])
    assert result.finish_reason == "stop"
    assert num_rows == []


def test_the_whole_prompt_and_each_kept_row_once(num_rows: list[int]) -> None:
    (prompt,) = random_prompts([20])
    engine = make_engine(tiny_model(), 1, max_num_batched_tokens=8)
    decode(engine, [Job(prompt, greedy(30))])
    num_kept = sum(num_rows)  # with K = 1 the head runs the kept rows and nothing else
    assert 20 + 25 <= num_kept <= 20 + 29
