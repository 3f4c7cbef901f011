"""Root-mean-square norms: which elements share a mean, and what the weight does."""

import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextRMSNorm,
    Qwen4ExpTextRMSNormGated,
    l2norm,
)

from outrider.layers.norm import RMSNorm, l2_normalise, rms_normalise
from tests.tolerances import assert_near

EPS = 1e-6


def make_norm(dim: int, **options: object) -> RMSNorm:
    norm = RMSNorm(dim, EPS, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        norm.weight.normal_()
    return norm


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("group_size", [None, 12, 4, 1])
def test_groups(group_size: int | None, scale: float) -> None:
    norm = make_norm(12, group_size=group_size).double()
    x = torch.randn(3, 5, 12, dtype=torch.float64) * scale
    output = norm(x)
    size = group_size or 12
    for start in range(0, 12, size):
        part = slice(start, start + size)
        root = (x[..., part].pow(2).mean(-1, keepdim=True) + EPS).sqrt()
        assert_near(output[..., part], x[..., part] / root * (1 + norm.weight[part]))


@pytest.mark.parametrize("group_size", [None, 4])
def test_equals_transformers(group_size: int | None) -> None:
    norm = make_norm(12, group_size=group_size)
    reference = Qwen4ExpTextRMSNorm(12, eps=EPS, group_size=group_size)
    reference.load_state_dict(norm.state_dict())
    x = torch.randn(7, 12) * torch.tensor([1e-4, 1.0, 100.0])[:, None, None]
    assert_near(norm(x), reference(x))


def test_plain_weight_is_the_factor_itself() -> None:
    norm = make_norm(8, is_plain=True)
    x, gate = torch.randn(4, 8), torch.randn(4, 8)
    assert_near(norm(x), rms_normalise(x, EPS) * norm.weight)
    reference = Qwen4ExpTextRMSNormGated(8, eps=EPS, activation="sigmoid")
    reference.load_state_dict(norm.state_dict())
    assert_near(norm(x) * torch.sigmoid(gate), reference(x, gate))
    norm.is_plain = False
    assert not torch.allclose(norm(x), rms_normalise(x, EPS) * norm.weight)


def test_streams_of_unequal_size_tell_groups_from_the_whole() -> None:
    x = torch.randn(5, 12) * torch.tensor([1.0] * 4 + [10.0] * 4 + [0.1] * 4)
    whole, grouped = make_norm(12), make_norm(12, group_size=4)
    grouped.load_state_dict(whole.state_dict())
    assert (whole(x) - grouped(x)).abs().max() > 1.0


def test_half_precision_is_normalised_in_float32() -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16) * 300
    output = rms_normalise(x, EPS)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, rms_normalise(x.float(), EPS).bfloat16())


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0])
def test_l2(scale: float) -> None:
    x = torch.randn(4, 3, 8) * scale
    assert_near(l2_normalise(x), l2norm(x, dim=-1, eps=EPS))
    assert_near(
        l2_normalise(x.double()), x.double() / (x.double().pow(2).sum(-1, True) + EPS).sqrt()
    )
