"""The differentiable forward of whole sequences, against transformers: layers, then logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.qwen4_exp.decoder_layer import DecoderLayer, SequenceOptions, SequenceOutput
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from tests.models.parity import (
    CONFIGS,
    SEED,
    TOLERANCE,
    is_clear,
    parity_config,
    parity_model,
    random_ids,
    recorded_margins,
    reference_model,
)

LENGTH = 50  # the budgets select 4 to 16 positions of these

# Far above any rounding: what a wrong reading of the architecture does at the least.
WRONG = 500 * TOLERANCE


def sequence_logits(model: Qwen4ExpForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] and which rows hold for certain [B, T]."""
    shape = (ids.shape[0], ids.shape[1])
    with torch.no_grad(), recorded_margins(shape) as margins:
        logits = model.logits(model.model.forward_sequence(ids).streams)
    return logits, is_clear(margins)


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str, seed: int) -> None:
    model = parity_model(name, seed=seed)
    reference = reference_model(model)
    ids = random_ids(2, LENGTH, model.config.eos_token_id or 0, seed)
    logits, is_compared = sequence_logits(model, ids)
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits
    assert is_compared.float().mean() > 0.9
    assert expected.std() > 0.3
    error = (logits - expected).abs().amax(-1)[is_compared]
    assert error.max() < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_by_layer(name: str) -> None:
    """Each layer is fed what the other implementation feeds its own."""
    model = parity_model(name)
    reference = reference_model(model)
    ids = random_ids(2, LENGTH, model.config.eos_token_id or 0)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(_module: object, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0])
        outputs.append(output)

    for layer in reference.model.layers:
        layer.register_forward_hook(record)
    with torch.no_grad():
        reference(ids, use_cache=False)
    angles = model.rotary.angles(torch.arange(LENGTH))
    assert len(outputs) == len(model.model.layers) == 4
    num_compared = 0
    for layer, streams, expected in zip(model.model.layers, inputs, outputs, strict=True):
        assert isinstance(layer, DecoderLayer)
        with torch.no_grad(), recorded_margins((2, LENGTH)) as margins:
            actual = layer.forward_sequence(
                streams, ids, angles, SequenceOptions(), SequenceOutput(streams)
            )
        is_compared = is_clear(margins)
        num_compared += int(is_compared.sum())
        assert (actual - expected).abs().amax(-1)[is_compared].max() < TOLERANCE / 2
    assert num_compared > 0.9 * 4 * ids.numel()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("three_streams_4grams_prime_base", {"output_gate_type": "silu"}),
        ("three_streams_4grams_prime_base", {"norm_topk_prob": False}),
        ("three_streams_4grams_prime_base", {"indexer_budget": 12}),
        ("three_streams_4grams_prime_base", {"indexer_budget": 64}),
        ("three_streams_4grams_prime_base", {"eos_token_id": 4}),
        ("three_streams_4grams_prime_base", {"rms_norm_eps": 1e-2}),
        ("three_streams_4grams_prime_base", {"rope_theta": 100.0}),
        ("three_streams_4grams_prime_base", {"partial_rotary_factor": 0.25}),
        ("silu_gate_unnormalised_experts_full_rotation", {"norm_topk_prob": True}),
        ("silu_gate_unnormalised_experts_full_rotation", {"num_experts_per_tok": 2}),
        ("silu_gate_unnormalised_experts_full_rotation", {"output_gate_type": "sigmoid"}),
        ("silu_gate_unnormalised_experts_full_rotation", {"partial_rotary_factor": 0.5}),
        ("sparse_first_one_key_head_odd_blocks", {"indexer_budget": 6}),
    ],
)
def test_a_field_that_is_read_wrongly_is_seen(name: str, overrides: dict[str, Any]) -> None:
    """The same weights under another configuration are far off: the comparison above can fail."""
    model = parity_model(name)
    other = Qwen4ExpForCausalLM(parity_config(name, **overrides), 1)
    other.load_state_dict(model.state_dict())
    other.build_tables()
    ids = random_ids(2, LENGTH, model.config.eos_token_id or 0)
    with torch.no_grad():
        expected = reference_model(model)(ids, use_cache=False).logits
        logits = other.logits(other.model.forward_sequence(ids).streams)
    assert (logits - expected).abs().max() > WRONG


def test_tiny_activations_reach_the_small_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model named so does depend on the l2 norm's epsilon and on the bound of the PLE gate."""
    model = parity_model("tiny_activations_quarter_rotation")
    ids = random_ids(2, LENGTH, 3)
    expected, _ = sequence_logits(model, ids)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.models.qwen4_exp.ngram_embedding._SMALLEST_DOT", 1e-12)
        # The bound moves a gate by 2.5e-4 at the most.
        assert (sequence_logits(model, ids)[0] - expected).abs().max() > 3 * TOLERANCE
    with monkeypatch.context() as patch:
        patch.setattr(
            "outrider.models.qwen4_exp.gated_delta_net.unit_rows",
            lambda x, _: torch.nn.functional.normalize(x, dim=-1),
        )
        assert (sequence_logits(model, ids)[0] - expected).abs().max() > WRONG


@pytest.mark.parametrize("name", CONFIGS)
def test_a_longer_budget_is_dense_attention(name: str) -> None:
    """Selection masks and nothing else: with a budget for everything it changes no logit."""
    model = parity_model(name)
    other = Qwen4ExpForCausalLM(parity_config(name, indexer_budget=model_budget(model, 64)), 1)
    other.load_state_dict(model.state_dict())
    other.build_tables()
    ids = random_ids(2, LENGTH, model.config.eos_token_id or 0)
    with torch.no_grad():
        dense = model.model.forward_sequence(ids, SequenceOptions(dense_attention=True)).streams
        sparse = model.model.forward_sequence(ids).streams
        whole = other.model.forward_sequence(ids).streams
    torch.testing.assert_close(whole, dense, rtol=0, atol=0)
    # Up to there everything is selected anyway.
    first_sparse = model_budget(model, 0) + model.config.indexer_compress_ratio - 1
    error = (sparse - dense).abs().amax((0, 2))
    assert error[:first_sparse].max() < TOLERANCE
    assert error[first_sparse:].max() > WRONG


def model_budget(model: Qwen4ExpForCausalLM, least: int) -> int:
    """The model's budget, or the multiple of its ratio from `least` on."""
    ratio = model.config.indexer_compress_ratio
    return max(model.config.indexer_budget, -(-least // ratio) * ratio)
