"""Drawing by the inverse of the cumulative distribution: which id, and never one of mass 0."""

import bisect
import itertools

import pytest
import torch
from torch import Tensor

from outrider.sampling import sample_from_probs
from tests.chi_square import chi_square_p_value

SMALLEST, LARGEST = 2.0**-53, 1 - 2.0**-53
REAL_VOCAB = 248_320


def draw_naive(probs: list[float], uniform: float) -> int:
    cdf = list(itertools.accumulate(probs))
    last = max(token_id for token_id, p in enumerate(probs) if p > 0)
    return min(bisect.bisect_right(cdf, uniform * cdf[-1]), last)


@pytest.mark.parametrize(
    ("uniform", "token_id"),
    [(SMALLEST, 1), (0.25, 1), (0.4999, 1), (0.5, 3), (0.7, 3), (0.75, 4), (LARGEST, 4)],
)
def test_edges_belong_to_the_id_above(uniform: float, token_id: int) -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]])
    drawn = sample_from_probs(probs, torch.tensor([uniform], dtype=torch.float64))
    assert drawn.tolist() == [token_id]
    assert drawn.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.3, 17.0])
def test_equals_the_naive_draw(dtype: torch.dtype, scale: float) -> None:
    probs = (torch.randn(300, 40) * 4).softmax(-1).to(dtype) * scale
    probs = probs.masked_fill(torch.rand(300, 40) < 0.4, 0)
    probs[:, 20] += 1e-3
    uniforms = torch.rand(300, dtype=torch.float64)
    uniforms[:20], uniforms[20:40] = SMALLEST, LARGEST
    expected = [
        draw_naive(row, u) for row, u in zip(probs.tolist(), uniforms.tolist(), strict=True)
    ]
    assert sample_from_probs(probs, uniforms).tolist() == expected


def test_never_an_id_of_probability_zero() -> None:
    """Every uniform at and beside the edges of a sparse law."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        probs = torch.rand(30, generator=generator).masked_fill(
            torch.rand(30, generator=generator) < 0.7, 0
        )
        probs[int(torch.randint(30, (), generator=generator))] = 1e-30
        cdf = probs.double().cumsum(-1)
        edges = cdf / cdf[-1]
        zero, one = torch.zeros_like(edges), torch.ones_like(edges)
        beside = [edges, edges.nextafter(zero), edges.nextafter(one)]
        uniforms = torch.cat([*beside, torch.tensor([SMALLEST, LARGEST], dtype=torch.float64)])
        uniforms = uniforms.clamp(SMALLEST, LARGEST)
        drawn = sample_from_probs(probs.expand(len(uniforms), 30), uniforms)
        assert (probs[drawn] > 0).all()


@pytest.mark.parametrize("num_tail", [0, 1, 100_000])
def test_real_vocabulary_in_float32(num_tail: int) -> None:
    """The sum of float32 probabilities is not 1, and its tail may be masked."""
    probs = (torch.randn(4, REAL_VOCAB) * 3).softmax(-1)
    probs[:, REAL_VOCAB - num_tail :] = 0
    probs[:, ::3] = 0
    support = probs > 0
    uniforms = torch.tensor([SMALLEST, 0.5, 1 - 1e-9, LARGEST], dtype=torch.float64)
    drawn = sample_from_probs(probs, uniforms)
    assert support.gather(-1, drawn.unsqueeze(-1)).all()
    assert drawn[0] == support[0].int().argmax()
    last = support[3].nonzero().max()
    assert probs[3, drawn[3] + 1 :].double().sum() < 1e-15
    assert drawn[3] <= last
    # The cumulative sum is as fine as the uniform, whatever the dtype of the probabilities.
    below = probs[1].double()[: drawn[1]].sum() / probs[1].double().sum()
    assert below <= 0.5 < below + probs[1, drawn[1]].double() / probs[1].double().sum()


def test_every_id_of_a_flat_real_vocabulary_is_within_reach() -> None:
    """float32 uniforms could not tell these apart: they have 2**24 values, unevenly used."""
    probs = torch.ones(1, REAL_VOCAB)
    token_ids = torch.arange(0, REAL_VOCAB, 7919)
    uniforms = (token_ids.double() + 0.5) / REAL_VOCAB
    drawn = sample_from_probs(probs.expand(len(token_ids), -1), uniforms)
    assert torch.equal(drawn, token_ids)


def test_law_of_the_draws() -> None:
    law = torch.tensor([0.05, 0.0, 0.2, 0.5, 0.0, 0.25])
    uniforms = torch.rand(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = sample_from_probs(law.expand(200_000, 6), uniforms.clamp(SMALLEST, LARGEST)).bincount(
        minlength=6
    )
    # One false alarm in a million seeds.
    assert chi_square_p_value(counts, law) > 1e-6


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_any_leading_shape_and_stride(shape: tuple[int, ...]) -> None:
    probs = torch.rand(*shape, 11, dtype=torch.float64)
    uniforms = torch.rand(shape, dtype=torch.float64)
    drawn = sample_from_probs(probs, uniforms)
    assert drawn.shape == shape
    strided = probs.movedim(-1, 0).contiguous().movedim(0, -1)
    assert torch.equal(
        sample_from_probs(strided, uniforms.mT.contiguous().mT if shape[1:] else uniforms), drawn
    )
    flat = zip(probs.view(-1, 11).tolist(), uniforms.flatten().tolist(), strict=True)
    assert drawn.flatten().tolist() == [draw_naive(row, u) for row, u in flat]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_row_that_is_no_law_stays_in_the_vocabulary_and_to_itself(value: float) -> None:
    probs = torch.rand(3, 9)
    uniforms = torch.rand(3, dtype=torch.float64)
    healthy = sample_from_probs(probs, uniforms)
    for broken in (torch.full((9,), value), probs[1].index_fill(0, torch.tensor([4]), value)):
        drawn = sample_from_probs(torch.stack([probs[0], broken, probs[2]]), uniforms)
        assert ((drawn >= 0) & (drawn < 9)).all()
        assert torch.equal(drawn[::2], healthy[::2])


def test_sums_that_fall_or_rise_at_ids_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a parallel scan may do, made large: the answer keeps to the support."""
    noise = torch.tensor([1e-3, 0.0, 1e-3, -1e-3, 0.0, 2e-3, 1e-3])
    exact = Tensor.cumsum

    def rough(tensor: Tensor, dim: int, *, dtype: torch.dtype) -> Tensor:
        return exact(tensor, dim, dtype=dtype) + noise

    monkeypatch.setattr(Tensor, "cumsum", rough)
    probs = torch.tensor([0.0, 0.4, 0.0, 0.0, 0.6, 0.0, 0.0])
    uniforms = torch.linspace(1e-6, 1 - 1e-6, 5000, dtype=torch.float64)
    drawn = sample_from_probs(probs.expand(5000, 7), uniforms)
    assert drawn.unique().tolist() == [1, 4]
