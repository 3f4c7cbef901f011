"""The bundled checkpoint: transformers loads it, every block is in it, its head drafts well."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpForCausalLM as ReferenceForCausalLM,
)

from outrider.batch import MarginProbe
from outrider.bundled import BUNDLED_MODEL_DIR, BUNDLED_PROMPTS
from outrider.entrypoints.llm import LLM
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.models.qwen4_exp.weights import load_model
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer
from tests.models.feeder import Feeder, Piece, random_pieces
from tests.models.parity import MIN_MARGIN
from tests.training.prompt_lines import load_prompts

transformers.logging.set_verbosity_error()

WEIGHTS = BUNDLED_MODEL_DIR / "model.safetensors"
MAX_BYTES = 25_000_000
LENGTH = 300  # tokens; past the indexer's budget of 256
# Of logits in float32. Streams and logits are larger than in the tiny models, and layers are three
# times as many.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Qwen4ExpForCausalLM:
    return load_model(BUNDLED_MODEL_DIR, want_mtp=True)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    tokenizer = Tokenizer.from_pretrained(BUNDLED_MODEL_DIR, 4096)
    text = "\n".join(prompt.prompt for prompt in load_prompts(BUNDLED_PROMPTS)[:8])
    return tokenizer.encode(text)[:LENGTH]


def topk_lowest_first(scores: Tensor, k: int, dim: int) -> Any:
    """Of equal scores the lowest index; Tensor.topk promises no order among them."""
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return SimpleNamespace(values=values.narrow(dim, 0, k), indices=indices.narrow(dim, 0, k))


@pytest.fixture(scope="module")
def expected(token_ids: list[int]) -> Tensor:
    """Logits [T, V] of transformers, which reads the same files.

    Blocks that no head of an indexer looks at tie at score 0; both sides must break ties alike.
    """
    reference = ReferenceForCausalLM.from_pretrained(BUNDLED_MODEL_DIR, dtype=torch.float32).eval()
    reference.set_experts_implementation("eager")
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "topk", topk_lowest_first)
        return reference(torch.tensor([token_ids]), use_cache=False).logits[0]


def test_size() -> None:
    assert WEIGHTS.stat().st_size <= MAX_BYTES


def test_every_block_is_in_it(model: Qwen4ExpForCausalLM) -> None:
    config = model.config
    assert len(config.linear_layer_indices) == 9
    assert len(config.indexed_layer_indices) == 3
    assert config.ple_layer_indices
    assert config.num_experts > config.num_experts_per_tok > 1
    assert config.hc_count == 4
    assert model.mtp is not None
    assert config.indexer_budget + config.indexer_compress_ratio < LENGTH


def test_no_block_is_idle(model: Qwen4ExpForCausalLM) -> None:
    """Training has moved what starts at zero: the n-gram convolution, every norm."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("conv1d.weight"):
            assert parameter.abs().max() > 1e-3, name


def compared_rows(model: Qwen4ExpForCausalLM, token_ids: list[int]) -> Tensor:
    """[T] bool: rows whose own discrete choices are too clear for rounding to turn."""
    probe = MarginProbe()
    Feeder(model, [token_ids], 0).run([Piece(0, len(token_ids))], probe)
    return torch.stack([*probe.router, *probe.indexer]).amin(0) > MIN_MARGIN


def check(
    model: Qwen4ExpForCausalLM, token_ids: list[int], logits: Tensor, expected: Tensor
) -> None:
    """At least 90 % of the rows are compared, and all of them are near."""
    is_compared = compared_rows(model, token_ids)
    assert is_compared.float().mean() >= 0.9
    assert expected.std() > 1
    assert (logits - expected).abs().amax(-1)[is_compared].max() < TOLERANCE


def test_transformers_gives_the_same_logits(
    model: Qwen4ExpForCausalLM, token_ids: list[int], expected: Tensor
) -> None:
    with torch.no_grad():
        streams = model.model.forward_sequence(torch.tensor([token_ids])).streams
        check(model, token_ids, model.logits(streams)[0], expected)


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [7] * 43, [64] * 5], ids=["one", "seven", "64"])
def test_pieces(
    model: Qwen4ExpForCausalLM, token_ids: list[int], expected: Tensor, sizes: list[int]
) -> None:
    feeder = Feeder(model, [token_ids], num_pending_rows=0)
    rows = []
    for size in sizes:
        left = len(feeder.left(0))
        if left:
            rows += feeder.run([Piece(0, min(size, left))])
    check(model, token_ids, torch.cat(rows), expected)


def test_windows_with_rejections(
    model: Qwen4ExpForCausalLM, token_ids: list[int], expected: Tensor
) -> None:
    """Windows of 1 to 9 rows, drafts right and wrong; the rows that are kept are compared."""
    feeder = Feeder(model, [token_ids], num_pending_rows=8)
    rng = random.Random(3)
    logits = torch.full_like(expected, torch.nan)
    while feeder.left(0):
        (piece,) = random_pieces(feeder, 8, rng)
        start = feeder.num_fed(0)
        num_kept = piece.num_certain + piece.num_accepted
        (rows,) = feeder.run([piece])
        logits[start : start + num_kept] = rows[:num_kept]
    check(model, token_ids, logits, expected)


def test_the_head_drafts_well() -> None:
    """On held-out prompts, temperature 0, K = 3; the figure of the README is over more of them."""
    llm = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3}, max_model_len=512)
    prompts = [prompt.prompt for prompt in load_prompts(BUNDLED_PROMPTS)[::12]]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48))
    assert llm.llm_engine.metrics.num_drafts > 50
    assert llm.llm_engine.metrics.mean_acceptance_length > 2.0
