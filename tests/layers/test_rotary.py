"""Rotary embedding: what turns, by how much, and that only differences of places matter."""

import math

import pytest
import torch
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from outrider.layers.rotary import RotaryEmbedding
from tests.tolerances import assert_near

CPU = torch.device("cpu")


def make_rotary(rotary_dim: int, theta: float = 1e4, max_positions: int = 64) -> RotaryEmbedding:
    rotary = RotaryEmbedding(rotary_dim, theta, max_positions)
    rotary.build(CPU, torch.float64)
    return rotary


@pytest.mark.parametrize("rotary_dim", [2, 4, 8])
def test_pairs_turn_and_the_rest_passes_through(rotary_dim: int) -> None:
    rotary = make_rotary(rotary_dim)
    x = torch.randn(20, 8, dtype=torch.float64)
    output = rotary(x, rotary.angles(torch.arange(20)))
    half = rotary_dim // 2
    assert torch.equal(output[:, rotary_dim:], x[:, rotary_dim:])
    assert torch.equal(output[0], x[0])
    for t in range(20):
        for j in range(half):
            angle = t * 1e4 ** (-2 * j / rotary_dim)
            a, b = float(x[t, j]), float(x[t, j + half])
            turned = a * math.cos(angle) - b * math.sin(angle)
            other = b * math.cos(angle) + a * math.sin(angle)
            # The frequencies and angles are those of float32, as in the checkpoint's own code.
            assert float(output[t, j]) == pytest.approx(turned, abs=1e-5)
            assert float(output[t, j + half]) == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("theta", [1e4, 1e7])
def test_equals_transformers(theta: float, factor: float) -> None:
    """Text positions are the same on its three axes, so its interleaving has no effect."""
    head_dim, num_positions = 64, 5000
    config = Qwen4ExpTextConfig(
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": factor,
            "mrope_section": [11, 11, 10],
        },
    )
    reference = Qwen4ExpTextRotaryEmbedding(config)
    positions = torch.cat([torch.arange(64), torch.tensor([1000, num_positions - 1])])
    x = torch.randn(1, len(positions), 3, head_dim)
    cos, sin = reference(x, positions.expand(3, 1, -1))
    expected = apply_rotary_pos_emb(x, cos=cos, sin=sin, unsqueeze_dim=2)
    rotary = RotaryEmbedding(int(head_dim * factor), theta, num_positions)
    rotary.build(CPU, torch.float32)
    angles = [angle[None, :, None] for angle in rotary.angles(positions)]
    # One ulp of a frequency, times a position: 5000 * 6e-8.
    torch.testing.assert_close(rotary(x, (angles[0], angles[1])), expected, rtol=0, atol=2e-3)
    near = slice(0, 64)
    assert_near(rotary(x, (angles[0], angles[1]))[:, near], expected[:, near])


def test_only_the_difference_of_places_matters() -> None:
    rotary = make_rotary(8)
    query, key = torch.randn(2, 8, dtype=torch.float64)

    def product(at: int, other: int) -> float:
        turned = rotary(torch.stack([query, key]), rotary.angles(torch.tensor([at, other])))
        return float(turned[0] @ turned[1])

    assert product(9, 2) == pytest.approx(product(40, 33), abs=1e-5)
    assert product(9, 2) != pytest.approx(product(9, 3), abs=1e-2)


def test_the_table_ends_with_the_longest_sequence() -> None:
    rotary = make_rotary(4, max_positions=10)
    with pytest.raises(IndexError):
        rotary.angles(torch.tensor([10]))


def test_dtype_is_that_of_the_model() -> None:
    rotary = RotaryEmbedding(4, 1e4, 10)
    rotary.build(CPU, torch.bfloat16)
    x = torch.randn(10, 4, dtype=torch.bfloat16)
    assert rotary(x, rotary.angles(torch.arange(10))).dtype == torch.bfloat16
