"""Losslessness of the engine: whatever is drafted, the text is that of plain decoding.

At temperature 0, and at temperature 1 under the rule `coupled`: token for token what K = 0 gives
to the request alone, for K = 1..8 and for drafts from the head and from stubs that are random,
never right, right but for one place, always right, or have holes; alone and in a batch of 8 that
requests join and leave. Exactly, in float64; in float32 but for near-ties, which are counted.
The same for the bundled checkpoint is in test_lossless_matrix.py.
"""

from functools import cache

import pytest
import torch

from outrider.engine.engine import LLMEngine
from outrider.engine.scheduler import Scheduler
from outrider.sampling_params import SamplingParams
from tests.scripted_proposer import Drafter, Script, ScriptedProposer
from tests.tiny_engine import (
    VOCAB_SIZE,
    Decoded,
    Job,
    decode,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
)

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 12, 13, 16, 17, 20, 24, 25, 31, 33)
MAX_TOKENS = 48
STUBS = ("random", "adversarial", "one_error", "perfect", "placeholders")
NEAR_TIE_MARGIN = 1e-4  # float32: what the other last bits of another shape may decide
ALL_K = range(1, 9)
# "mixed" gives every request of a batch another stub; some K run with each stub for all requests.
BATCHES = [
    *((k, drafter) for k in ALL_K for drafter in ("head", "mixed")),
    *((k, drafter) for k in (1, 3, 8) for drafter in STUBS),
]

model = cache(tiny_model)


@cache
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@cache
def references(dtype: torch.dtype = torch.float64, temperature: float = 0.0) -> list[list[int]]:
    """Prompt and output of plain decoding, each request alone."""
    jobs = [Job(prompt, params(i, temperature)) for i, prompt in enumerate(prompts())]
    return [[*job.prompt, *decode_alone(model(dtype), job).token_ids] for job in jobs]


def params(index: int, temperature: float, max_tokens: int = MAX_TOKENS) -> SamplingParams:
    if temperature == 0:
        return greedy(max_tokens)
    return SamplingParams(
        temperature=temperature,
        seed=index,
        max_tokens=max_tokens,
        ignore_eos=True,
        rejection_sample_method="coupled",
    )


def script(drafter: str, reference: list[int], index: int, k: int) -> Script:
    scripts = Drafter(reference, VOCAB_SIZE)
    if drafter == "mixed":
        drafter = STUBS[index % len(STUBS)]
    if drafter == "one_error":
        return scripts.one_error(1 + index % k)
    return getattr(scripts, drafter)


def staggered_jobs(members: range, temperature: float = 0.0) -> list[Job]:
    """Requests of different lengths that join a batch of 8 at different steps."""
    return [
        Job(prompts()[i], params(i, temperature, MAX_TOKENS - 5 * (i % 4)), arrival=(i * 5) % 16)
        for i in members
    ]


def drafting_engine(
    k: int, drafter: str, texts: list[list[int]], dtype: torch.dtype = torch.float64, **options: int
) -> LLMEngine:
    """An engine whose proposer is the head or a stub that knows the texts of its requests."""
    engine = make_engine(model(dtype), k, **options)
    if drafter != "head":
        scripts = {str(i): script(drafter, text, i, k) for i, text in enumerate(texts)}
        engine.proposer = ScriptedProposer(scripts, k)
    return engine


def assert_texts(results: list[Decoded], jobs: list[Job], texts: list[list[int]]) -> None:
    for result, job, text in zip(results, jobs, texts, strict=True):
        first, cap = len(job.prompt), job.params.max_tokens
        assert cap is not None
        assert result.token_ids == text[first : first + cap]
        assert (result.finish_reason, result.stop_reason) == ("length", None)


def assert_windows(results: list[Decoded], drafter: str, k: int) -> None:
    """A stub's drafts are kept exactly as far as they are what the target says."""
    for i, result in enumerate(results):
        stub = STUBS[i % len(STUBS)] if drafter == "mixed" else drafter
        assert result.windows[0] == (0, 0, 1), "a prompt has no drafts"
        for num_drafts, num_accepted, num_emitted in result.windows[1:]:
            assert num_emitted == num_accepted + 1
            expected = {
                "adversarial": 0,
                "one_error": min(i % k, num_drafts),
                "perfect": num_drafts,
                "placeholders": num_drafts,
            }.get(stub, num_accepted)
            assert num_accepted == expected
        full = [window for window in result.windows if window[0] == k]
        assert full or stub == "placeholders", "every K is drafted as such"


@pytest.mark.parametrize(("k", "drafter"), BATCHES)
def test_greedy_in_a_batch(k: int, drafter: str) -> None:
    jobs, texts = staggered_jobs(range(len(LENGTHS))), references()
    engine = drafting_engine(k, drafter, texts)
    results = decode(engine, jobs)
    assert_texts(results, jobs, texts)
    assert_windows(results, drafter, k)
    metrics = engine.metrics
    assert metrics.num_emitted_tokens == sum(len(result.token_ids) for result in results)
    if drafter == "head":
        assert metrics.mean_acceptance_length > 1.3, "too few drafts are kept to show anything"
    if drafter == "perfect":
        windows = [window for result in results for window in result.windows if window[0] == k]
        assert {num_emitted for _, _, num_emitted in windows} == {k + 1}


@pytest.mark.parametrize("drafter", ["head", *STUBS])
@pytest.mark.parametrize("k", ALL_K)
def test_greedy_alone(k: int, drafter: str) -> None:
    i = 2 * k - 1  # another prompt for each K
    jobs, texts = [Job(prompts()[i], params(i, 0.0, MAX_TOKENS // 2))], [references()[i]]
    results = decode(drafting_engine(k, drafter, texts), jobs)
    assert_texts(results, jobs, texts)
    assert_windows(results, drafter, k)


@pytest.mark.parametrize("drafter", ["head", "placeholders"])
@pytest.mark.parametrize("k", ALL_K)
def test_coupled_at_temperature_1(k: int, drafter: str) -> None:
    jobs, texts = staggered_jobs(range(8), temperature=1.0), references(temperature=1.0)[:8]
    engine = drafting_engine(k, drafter, texts)
    assert_texts(decode(engine, jobs), jobs, texts)
    assert engine.metrics.num_accepted_tokens > 0
    assert texts != references()[:8]


@pytest.mark.parametrize(
    "options", [{"draft_sample_method": "greedy"}, {"index_share_for_mtp_iteration": True}]
)
def test_other_drafts_of_the_head(options: dict[str, object]) -> None:
    for temperature in (0.0, 1.0):
        jobs, texts = staggered_jobs(range(8), temperature), references(temperature=temperature)[:8]
        assert_texts(decode(make_engine(model(), 4, **options), jobs), jobs, texts)


# Budgets of rows that cut prompts into pieces; with K drafts the least one is K + 1.
@pytest.mark.parametrize(
    ("k", "budget"), [(0, 1), (0, 7), (1, 2), (1, 7), (3, 4), (3, 7), (6, 7), (8, 9)]
)
def test_prompts_in_pieces(k: int, budget: int) -> None:
    """Under `coupled` as well: the random numbers of a token know nothing of pieces."""
    for temperature in (0.0, 1.0):
        jobs = [Job(prompts()[i], params(i, temperature, 16), arrival=3 * i) for i in range(8, 12)]
        texts = references(temperature=temperature)[8:12]
        for drafter in ("head", "one_error") if k else ("head",):
            engine = drafting_engine(k, drafter, texts, max_num_batched_tokens=budget)
            assert_texts(decode(engine, jobs), jobs, texts)


def test_prompts_one_token_at_a_time_with_drafts_configured() -> None:
    """No draft finds room then, and the states are those of an engine that drafts."""
    jobs, texts = [Job(prompts()[i], params(i, 0.0, 12)) for i in range(5)], references()[:5]
    engine = make_engine(model(), 3)
    engine.scheduler = Scheduler(
        engine.cache_manager, max_num_batched_tokens=1, num_speculative_tokens=3
    )
    assert_texts(decode(engine, jobs), jobs, texts)
    assert engine.metrics.num_drafts == 0


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("drafter", ["head", "one_error"])
def test_float32_up_to_near_ties(k: int, drafter: str) -> None:
    dtype = torch.float32
    jobs, texts = staggered_jobs(range(len(LENGTHS))), references(dtype)
    engine = drafting_engine(k, drafter, texts, dtype)
    near_ties, num_tokens = 0, 0
    for result, job, text in zip(decode(engine, jobs), jobs, texts, strict=True):
        first, cap = len(job.prompt), len(result.token_ids)
        num_tokens += cap
        assert cap == job.params.max_tokens
        expected = text[first : first + cap]
        if result.token_ids == expected:
            continue
        pairs = zip(result.token_ids, expected, strict=True)
        place = next(i for i, (got, plain) in enumerate(pairs) if got != plain)
        margins = engine.margins(text[: first + place], first, job.params)
        assert margins.min() < NEAR_TIE_MARGIN, f"position {place} differs"
        near_ties += 1
    assert near_ties <= max(1, num_tokens // 10_000)
