"""The full matrix of losslessness: the bundled checkpoint on prompts its training did not see.

float32: 100 prompts x 128 tokens, K = 1..8, drafts from the head, random, never right, and right
but for one place that moves through the window, each request alone and in a batch of 8 that the
others leave and join; and `coupled` at temperature 1 over 50 prompts. A text that differs from
K = 0 must have had a near-tie at or before the place, and there may be one such text in 10,000
tokens; each is written to the terminal. float64: 16 prompts x 64 tokens, exactly. About two hours
on one core; `make verify` runs it.
"""

import json
import sys
from functools import cache

import pytest
import torch

from outrider.bundled import BUNDLED_MODEL_DIR, BUNDLED_PROMPTS
from outrider.engine.engine import LLMEngine
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.models.qwen4_exp.weights import load_model
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer
from tests.scripted_proposer import Drafter, ScriptedProposer
from tests.tiny_engine import Decoded, Job, decode, greedy, make_engine

NUM_PROMPTS, NUM_COUPLED_PROMPTS, MAX_TOKENS = 100, 50, 128
NUM_EXACT_PROMPTS, NUM_EXACT_TOKENS = 16, 64
BATCH_SIZE = 8
NEAR_TIE_MARGIN = 1e-4
ALL_K = range(1, 9)
DRAFTERS = ("head", "random", "adversarial", "moving_error")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (BUNDLED_MODEL_DIR / "model.safetensors").exists(),
        reason="the weights of the bundled checkpoint are not there",
    ),
]


@cache
def model(dtype: torch.dtype) -> Qwen4ExpForCausalLM:
    return load_model(
        BUNDLED_MODEL_DIR, device="cpu", dtype=dtype, want_mtp=True, max_positions=512
    )


@cache
def prompts() -> list[list[int]]:
    vocab_size = model(torch.float32).config.vocab_size
    tokenizer = Tokenizer.from_pretrained(BUNDLED_MODEL_DIR, vocab_size)
    lines = BUNDLED_PROMPTS.read_text().splitlines()
    encoded = [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]
    assert len(encoded) >= NUM_PROMPTS
    return encoded[:NUM_PROMPTS]


def jobs(count: int, max_tokens: int, temperature: float) -> list[Job]:
    coupled = {"temperature": temperature, "rejection_sample_method": "coupled"}
    return [
        Job(
            prompt,
            greedy(max_tokens, seed=i)
            if temperature == 0
            else SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True, **coupled),
        )
        for i, prompt in enumerate(prompts()[:count])
    ]


def engine(k: int, dtype: torch.dtype, batch_size: int = BATCH_SIZE) -> LLMEngine:
    return make_engine(model(dtype), k, max_model_len=512, max_num_seqs=batch_size, block_size=16)


@cache
def references(
    count: int, max_tokens: int, temperature: float, dtype: torch.dtype
) -> list[list[int]]:
    """Outputs of plain decoding."""
    results = decode(engine(0, dtype), jobs(count, max_tokens, temperature))
    return [result.token_ids for result in results]


def decode_with(
    drafter: str,
    k: int,
    batch: list[Job],
    texts: list[list[int]],
    dtype: torch.dtype,
    batch_size: int = BATCH_SIZE,
) -> tuple[list[Decoded], LLMEngine]:
    drafting = engine(k, dtype, batch_size)
    vocab_size = model(dtype).config.vocab_size
    if drafter != "head":
        scripts = {
            str(i): getattr(Drafter([*job.prompt, *text], vocab_size), drafter)
            for i, (job, text) in enumerate(zip(batch, texts, strict=True))
        }
        drafting.proposer = ScriptedProposer(scripts, k)
    return decode(drafting, batch), drafting


def assert_equal_up_to_near_ties(
    results: list[Decoded],
    batch: list[Job],
    texts: list[list[int]],
    drafting: LLMEngine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    near_ties = []
    for i, (result, job, text) in enumerate(zip(results, batch, texts, strict=True)):
        assert len(result.token_ids) == len(text)
        if result.token_ids == text:
            continue
        pairs = zip(result.token_ids, text, strict=True)
        place = next(n for n, (got, plain) in enumerate(pairs) if got != plain)
        before = [*job.prompt, *text[:place]]
        margin = float(drafting.margins(before, len(job.prompt), job.params).min())
        near_ties.append(f"prompt {i}, position {place}, margin {margin:.1e}")
        assert margin < NEAR_TIE_MARGIN, near_ties[-1]
    with capsys.disabled():
        for line in near_ties:
            sys.stderr.write(f"\nnear-tie: {line}\n")
    num_tokens = sum(map(len, texts))
    assert len(near_ties) <= max(1, num_tokens // 10_000), near_ties


@pytest.mark.parametrize("k", ALL_K)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("batch_size", [BATCH_SIZE, 1])
def test_greedy(batch_size: int, drafter: str, k: int, capsys: pytest.CaptureFixture[str]) -> None:
    shape = (NUM_PROMPTS, MAX_TOKENS, 0.0)
    batch, texts = jobs(*shape), references(*shape, torch.float32)
    results, drafting = decode_with(drafter, k, batch, texts, torch.float32, batch_size)
    assert_equal_up_to_near_ties(results, batch, texts, drafting, capsys)
    accepted = drafting.metrics.acceptance_rate_per_pos
    if drafter == "head":
        assert accepted[0] > 0.5, "the head of the bundled checkpoint is right more often than not"
    elif drafter == "adversarial":
        assert drafting.metrics.num_accepted_tokens == 0
    elif drafter == "moving_error" and k > 1:
        assert 0 < accepted[k - 2] < 1


@pytest.mark.parametrize("k", ALL_K)
def test_coupled_at_temperature_1(k: int, capsys: pytest.CaptureFixture[str]) -> None:
    shape = (NUM_COUPLED_PROMPTS, MAX_TOKENS, 1.0)
    batch, texts = jobs(*shape), references(*shape, torch.float32)
    results, drafting = decode_with("head", k, batch, texts, torch.float32)
    assert_equal_up_to_near_ties(results, batch, texts, drafting, capsys)
    assert drafting.metrics.mean_acceptance_length > 1.2


@pytest.mark.parametrize("k", ALL_K)
@pytest.mark.parametrize(
    ("drafter", "temperature"), [("head", 0.0), ("head", 1.0), ("moving_error", 0.0)]
)
def test_exactly_in_float64(drafter: str, temperature: float, k: int) -> None:
    shape = (NUM_EXACT_PROMPTS, NUM_EXACT_TOKENS, temperature)
    batch, texts = jobs(*shape), references(*shape, torch.float64)
    results, _ = decode_with(drafter, k, batch, texts, torch.float64)
    assert [result.token_ids for result in results] == texts
