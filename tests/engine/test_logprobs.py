"""Log probabilities of outputs and prompts: those of plain decoding, whatever was drafted.

The reference is one pass of the model over the finished text, and the parameters read one row at a
time in plain Python.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from outrider.batch import RowSpan, ScheduledBatch
from outrider.engine.engine import LLMEngine
from outrider.engine.prompt_logprobs import PromptLogprobs
from outrider.errors import RequestError
from outrider.logprobs import TokenLogprobs
from outrider.request import Request
from outrider.sampling.logits_processors_naive import process_logits_naive
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.rejection_sampler import RejectionSampler
from outrider.stop_checker import StopChecker
from tests.sampling.test_compute_probs import compute_probs_naive
from tests.scripted_proposer import Drafter, ScriptedProposer
from tests.tiny_engine import VOCAB_SIZE, make_engine, random_prompts
from tests.tiny_engine import tiny_model as make_tiny_model

NUM_REQUESTS, MAX_TOKENS, CHUNK = 8, 16, 8
MODES = ("raw_logprobs", "processed_logprobs")

tiny_model = cache(make_tiny_model)


@dataclass
class Reported:
    """What a request emitted, and what was reported of it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def run(engine: LLMEngine, jobs: list[tuple[list[int], SamplingParams]]) -> list[Reported]:
    results = {str(i): Reported() for i in range(len(jobs))}
    for i, (prompt, params) in enumerate(jobs):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            result = results[output.request_id]
            if not result.token_ids:
                result.prompt_logprobs = output.prompt_logprobs
            result.token_ids += output.new_token_ids
            if output.logprobs is not None:
                assert len(output.logprobs) == len(output.new_token_ids)
                result.logprobs = [*(result.logprobs or []), *output.logprobs]
    return list(results.values())


@cache
def prompts() -> list[list[int]]:
    return random_prompts([4 + 3 * i for i in range(NUM_REQUESTS)], seed=6)


def params(index: int) -> SamplingParams:
    """Greedy and sampled, with penalties or without, asking for some tokens, all, one or none."""
    options: dict[str, Any] = {"repetition_penalty": 1.3, "logit_bias": {5: 3}, "top_k": 12}
    return SamplingParams(
        temperature=(0.0, 0.8, 1.0)[index % 3],
        seed=index,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logprobs=(5, -1, 0, None)[index % 4],
        rejection_sample_method="coupled",
        **(options if index % 2 else {}),
    )


def expected_logprobs(
    prompt: list[int], output: list[int], of: SamplingParams, mode: str
) -> torch.Tensor:
    """[M, V] of each output token."""
    logits = sequence_logits([*prompt, *output])[len(prompt) - 1 : -1]
    if mode == "raw_logprobs":
        return logits.log_softmax(-1)
    rows = []
    for place, row in enumerate(logits.tolist()):
        processed = process_logits_naive(row, of, prompt, output[:place])
        if of.is_greedy:
            rows.append(torch.tensor(processed, dtype=torch.float64).log_softmax(-1))
            continue
        probs = compute_probs_naive(processed, of.temperature, of.top_k, of.top_p, of.min_p)
        rows.append(torch.tensor(probs, dtype=torch.float64).log())
    return torch.stack(rows)


def sequence_logits(token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        streams = tiny_model().model.forward_sequence(torch.tensor([token_ids])).streams
        return tiny_model().logits(streams)[0]


def assert_entry(entry: TokenLogprobs, own: int, row: torch.Tensor, num_top: int) -> None:
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:num_top]
    assert entry.token_ids == [own, *order]
    torch.testing.assert_close(
        torch.tensor(entry.logprobs, dtype=torch.float64), row[entry.token_ids], rtol=0, atol=1e-9
    )
    assert max(entry.logprobs) <= 0
    assert entry.rank == 1 + int((row > row[own]).sum())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [0, 3])
def test_output_logprobs(k: int, mode: str) -> None:
    """Accepted, recovered and bonus tokens alike, beside requests that ask for nothing."""
    jobs = [(prompt, params(i)) for i, prompt in enumerate(prompts())]
    engine = make_engine(tiny_model(), k, logprobs_mode=mode, max_logprobs=-1)
    results = run(engine, jobs)
    if k:
        assert 0.1 < engine.metrics.acceptance_rate < 0.9
    for (prompt, asked), result in zip(jobs, results, strict=True):
        assert len(result.token_ids) == MAX_TOKENS
        if asked.logprobs is None:
            assert result.logprobs is None
            continue
        assert result.logprobs is not None
        num_top = VOCAB_SIZE if asked.logprobs < 0 else asked.logprobs
        expected = expected_logprobs(prompt, result.token_ids, asked, mode)
        for own, entry, row in zip(result.token_ids, result.logprobs, expected, strict=True):
            assert_entry(entry, own, row, num_top)


@pytest.mark.parametrize("mode", MODES)
def test_greedy_batch_with_drafts_of_every_worth(mode: str) -> None:
    """The path that takes the argmax alone; drafts are all right, right but for one, or wrong."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    asked = SamplingParams(**options, logprobs=4, frequency_penalty=0.7)
    jobs = [(prompt, asked) for prompt in prompts()]
    plain = run(make_engine(tiny_model(), logprobs_mode=mode), jobs)
    engine = make_engine(tiny_model(), 3, logprobs_mode=mode)
    scripts = {}
    for i, (prompt, one) in enumerate(zip(prompts(), plain, strict=True)):
        drafter = Drafter([*prompt, *one.token_ids], VOCAB_SIZE)
        kinds = (drafter.perfect, drafter.one_error(2), drafter.adversarial, drafter.placeholders)
        scripts[str(i)] = kinds[i % 4]
    engine.proposer = ScriptedProposer(scripts, 3)
    for prompt, one, drafted in zip(prompts(), plain, run(engine, jobs), strict=True):
        assert drafted.token_ids == one.token_ids
        assert drafted.logprobs is not None
        expected = expected_logprobs(prompt, one.token_ids, asked, mode)
        for own, entry, row in zip(one.token_ids, drafted.logprobs, expected, strict=True):
            assert_entry(entry, own, row, 4)


@pytest.mark.parametrize("mode", MODES)
def test_ids_that_no_token_has_are_in_no_list(mode: str) -> None:
    """Nor in a rank, though in the raw law they have their mass: padding, and holes."""
    defaults = replace(
        make_engine(tiny_model()).sampling_defaults,
        num_allowed_tokens=VOCAB_SIZE - 9,
        missing_ids=frozenset({0, 5, 6, 30}),
        logprobs_mode=mode,
    )
    known = [i for i in range(VOCAB_SIZE - 9) if i not in defaults.missing_ids]
    engine = make_engine(tiny_model(), max_logprobs=-1)
    engine.rejection_sampler = RejectionSampler(defaults)
    engine.model_runner._prompt_logprobs = PromptLogprobs(tiny_model(), defaults.known_ids)
    asked = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=-1, prompt_logprobs=-1
    )
    prompt = [known[n % len(known)] for n in prompts()[3]]
    (result,) = run(engine, [(prompt, asked)])
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    logits = sequence_logits([*prompt, *result.token_ids])[:-1]
    laws = logits.log_softmax(-1)
    if mode == "processed_logprobs":
        laws[len(prompt) - 1 :, known] = logits[len(prompt) - 1 :, known].log_softmax(-1)
    entries = [*result.prompt_logprobs[1:], *result.logprobs]
    text = [*prompt[1:], *result.token_ids]
    for place, (own, entry, row) in enumerate(zip(text, entries, laws, strict=True)):
        assert entry is not None
        order = sorted(known, key=lambda i: (-float(row[i]), i))
        assert entry.token_ids == [own, *order]
        torch.testing.assert_close(
            torch.tensor(entry.logprobs).double(), row[entry.token_ids], rtol=0, atol=1e-6
        )
        assert entry.rank == 1 + int((row[known] > row[own]).sum())
        assert place < len(prompt) - 1 or entry.rank == 1, "the argmax of what may be drawn"


@pytest.mark.parametrize("k", [0, 3])
def test_prompt_logprobs_at_every_length_around_the_pieces(k: int) -> None:
    """Prompts of 1 to 2 pieces and two tokens, in pieces, several in one step."""
    lengths = [1, 2, *(n * CHUNK + i for n in (1, 2) for i in (-2, -1, 0, 1, 2))]
    numbers = [(3, -1, 0)[i % 3] for i in range(len(lengths))]
    jobs = [
        (
            prompt,
            SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=num, logit_bias={3: 50}),
        )
        for prompt, num in zip(random_prompts(lengths, seed=7), numbers, strict=True)
    ]
    engine = make_engine(tiny_model(), k, max_num_batched_tokens=CHUNK, max_logprobs=-1)
    # Three rows at a time: pieces of a prompt are cut again.
    engine.model_runner._prompt_logprobs = PromptLogprobs(
        tiny_model(), None, max_logits=3 * VOCAB_SIZE + 1
    )
    for (prompt, _), num, result in zip(jobs, numbers, run(engine, jobs), strict=True):
        assert_prompt(prompt, result.prompt_logprobs, VOCAB_SIZE if num < 0 else num)


def assert_prompt(
    prompt: list[int], reported: list[TokenLogprobs | None] | None, num_top: int
) -> None:
    assert reported is not None
    assert len(reported) == len(prompt)
    assert reported[0] is None
    rows = sequence_logits(prompt).log_softmax(-1)[:-1]
    for own, entry, row in zip(prompt[1:], reported[1:], rows, strict=True):
        assert entry is not None
        assert_entry(entry, own, row, num_top)


def test_nobody_who_asks_for_no_prompt_logprobs_gets_any() -> None:
    asked = SamplingParams(temperature=0, max_tokens=3, logprobs=1)
    (result,) = run(make_engine(tiny_model()), [(prompts()[0], asked)])
    assert result.prompt_logprobs is None


@pytest.mark.parametrize("num_before", [1, 5, 12, 13, 14])
def test_prompt_that_runs_again_is_reported_once(num_before: int) -> None:
    """As after a preemption: the caches are lost, what was reported is not."""
    engine, prompt = make_engine(tiny_model()), prompts()[3]
    asked = SamplingParams(prompt_logprobs=2)
    request = Request(
        "x",
        [*prompt, 7],
        len(prompt),
        asked,
        9,
        StopChecker(asked, frozenset(), 9, None),
        seed=0,
        prompt_logprobs=[],
    )
    whole = [(0, 4), (4, 9), (9, 14)]
    before = [(start, min(end, num_before)) for start, end in whole if start < num_before]
    for pieces in (before, whole):
        row = engine.cache_manager.allocate(20)
        for start, end in pieces:
            span = RowSpan(row, start, end - start, 0)
            with torch.inference_mode():
                engine.model_runner.verify(ScheduledBatch([request], [span], [False], None))
            engine.cache_manager.commit([span], [0])
        engine.cache_manager.free(row)
    assert request.prompt_logprobs is not None
    assert_prompt(prompt, [None, *request.prompt_logprobs], 2)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_than_the_engine_reports_is_refused(name: str) -> None:
    engine = make_engine(tiny_model(), max_logprobs=3)
    engine.check_request([1], SamplingParams(**{name: 3}))
    with pytest.raises(RequestError, match=f"^{name} 4 is more than max_logprobs 3$"):
        engine.check_request([1], SamplingParams(**{name: 4}))
    with pytest.raises(RequestError, match=f"^{name} -1, the whole vocabulary, is more than"):
        engine.check_request([1], SamplingParams(**{name: -1}))
