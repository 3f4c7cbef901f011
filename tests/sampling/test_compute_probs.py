"""From logits to probabilities, against a naive reading of the same rules."""

import math
from collections.abc import Collection
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.sampling import SamplingTensors, compute_probs, sample_from_probs

NOT_FINITE = [torch.nan, torch.inf]


def params(
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
    allowed_mask: Tensor | None = None,
) -> SamplingTensors:
    n = len(temperature)
    return SamplingTensors.from_values(
        temperature,
        top_k or [0] * n,
        top_p or [1.0] * n,
        min_p or [0.0] * n,
        allowed_mask=allowed_mask,
    )


def compute_probs_naive(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """One row, filter after filter; shares are exact fractions, top_p is read as a decimal."""
    if temperature == 0:
        best = logits.index(max(logits))
        return [float(token_id == best) for token_id in range(len(logits))]
    peak = max(logits)
    weights = [Fraction(math.exp((logit - peak) / temperature)) for logit in logits]
    kept = [i for i, weight in enumerate(weights) if weight >= min_p * (1 - 1e-12)]
    kept.sort(key=lambda token_id: (-weights[token_id], token_id))
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        total, mass, nucleus = sum(weights[i] for i in kept), Fraction(0), []
        for token_id in kept:
            if mass >= Fraction(str(top_p)) * total:
                break
            nucleus.append(token_id)
            mass += weights[token_id]
        kept = nucleus
    total = sum(weights[i] for i in kept)
    return [float(w / total) if i in kept else 0.0 for i, w in enumerate(weights)]


def random_parameters(
    num_rows: int, vocab_size: int, seed: int
) -> tuple[list[float], list[int], list[float], list[float]]:
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> list[float]:
        index = torch.randint(len(values), (num_rows,), generator=generator)
        return [values[i] for i in index.tolist()]

    ranks = pick([0, -1, 1, 2, 5, vocab_size - 1, vocab_size, 3 * vocab_size])
    return (
        pick([0.0, 0.3, 1.0, 2.0, 100.0]),
        [int(rank) for rank in ranks],
        pick([1.0, 0.05, 0.5, 0.9, 0.999]),
        pick([0.0, 0.02, 0.2, 1.0]),
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 33, 200])
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("draw", range(3))
def test_equals_the_naive_distribution(vocab_size: int, has_ties: bool, draw: int) -> None:
    num_rows = 100
    values = random_parameters(num_rows, vocab_size, draw)
    logits = torch.randn(num_rows, vocab_size, dtype=torch.float64) * 2
    if has_ties:
        logits = logits.round()
    probs = compute_probs(logits, params(*values))
    rows = zip(logits.tolist(), *values, strict=True)
    expected = torch.tensor([compute_probs_naive(*row) for row in rows], dtype=torch.float64)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("vocab_size", [40, 500])
def test_a_row_does_not_depend_on_its_batch(vocab_size: int) -> None:
    """Which passes run, and how the leading entries are found, hangs on the other rows."""
    num_rows = 60
    values = random_parameters(num_rows, vocab_size, 5)
    logits = torch.randn(num_rows, vocab_size).round(decimals=1)
    together = compute_probs(logits, params(*values))
    for row in range(num_rows):
        alone = compute_probs(logits[row : row + 1], params(*([value[row]] for value in values)))
        assert torch.equal(alone[0], together[row])


def test_rows_selects_and_repeats() -> None:
    values = random_parameters(8, 30, 2)
    mask = torch.rand(8, 30) < 0.8
    mask[:, 0] = True
    logits = torch.randn(8, 30)
    index = torch.tensor([3, 3, 0, 7, 7, 7])
    for allowed_mask in (None, mask, mask[0]):
        whole = params(*values, allowed_mask=allowed_mask)
        expected = compute_probs(logits, whole)[index]
        assert torch.equal(compute_probs(logits[index], whole.rows(index)), expected)


def test_order_of_the_filters() -> None:
    """Each filter sees what the one before left: a case where any other order gives another set."""
    law = torch.tensor([[0.4, 0.25, 0.2, 0.1, 0.05]], dtype=torch.float64)

    def support(**kwargs: list[float] | list[int]) -> list[int]:
        probs = compute_probs(law.log(), params([1.0], **kwargs))
        return probs[0].nonzero().flatten().tolist()

    # top_p 0.6 of the whole law takes two ids; of the two that top_k leaves (0.615, 0.385), one.
    assert support(top_p=[0.6]) == [0, 1]
    assert support(top_k=[2], top_p=[0.6]) == [0]
    # min_p leaves (0.47, 0.29, 0.24); 0.75 of that is two ids, of the whole law three.
    assert support(top_p=[0.75]) == [0, 1, 2]
    assert support(min_p=[0.5], top_p=[0.75]) == [0, 1]
    # Temperature comes before all of them: min_p is a share of the heated peak.
    assert compute_probs(law.log(), params([2.0], min_p=[0.5]))[0].count_nonzero() == 4


def test_ties_at_the_edge_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 2.0, 1.0, 1.0]])
    for vocab_pad in (0, 100):  # found by a full sort, and by topk
        padded = torch.nn.functional.pad(logits, (0, vocab_pad), value=-9.0)
        probs = compute_probs(padded, params([1.0], top_k=[3]))
        assert probs[0].nonzero().flatten().tolist() == [1, 2, 3]
        probs = compute_probs(padded, params([1.0], top_k=[5], top_p=[0.7]))
        assert probs[0].nonzero().flatten().tolist() == [1, 2, 3]
        probs = compute_probs(padded, params([0.0]))
        assert probs[0].argmax() == 3
    flat = torch.zeros(1, 8)
    assert compute_probs(flat, params([1.0], top_p=[0.5]))[0].tolist() == [0.25] * 4 + [0.0] * 4
    assert compute_probs(flat, params([0.0]))[0].tolist() == [1.0] + [0.0] * 7


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(200, 50).round(decimals=1)
    greedy = compute_probs(logits, params([0.0] * 200))
    assert torch.equal(compute_probs(logits, params([0.7] * 200, top_k=[1] * 200)), greedy)
    assert torch.equal(compute_probs(logits, params([50.0] * 200, top_k=[1] * 200)), greedy)
    assert torch.equal(compute_probs(logits, params([1.0] * 200, top_p=[1e-9] * 200)), greedy)
    assert torch.equal(greedy.argmax(-1), logits.argmax(-1))


def test_top_p_of_one_keeps_every_id() -> None:
    """Beside a row that uses top_p, whose pass must not shave the tail of the others."""
    logits = torch.linspace(0, -80, 300).expand(2, 300)
    probs = compute_probs(logits, params([1.0, 1.0], top_p=[1.0, 0.9]))
    assert torch.equal(probs[0], logits[0].softmax(-1))
    assert 0 < probs[1].count_nonzero() < 30


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-6, 1e6, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_temperatures(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[3e4, 2.9e4, -3e4, 3e4 - 1]], dtype=dtype)
    probs = compute_probs(logits, params([temperature]))
    assert probs.dtype == dtype
    expected = [1.0, 0.0, 0.0, 0.0] if temperature < 1 else probs[0].tolist()
    assert probs[0].tolist() == expected
    assert float(probs.sum()) == pytest.approx(1, abs=1e-6)
    if temperature == 1e38:
        assert probs[0].tolist() == [0.25] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_masked_stays_so_at_a_temperature_beyond_float32(dtype: torch.dtype) -> None:
    mask = torch.tensor([True, False, True])
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype)
    probs = compute_probs(logits, params([1e300], min_p=[0.5], allowed_mask=mask))
    assert probs[0].tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.3, 10.0])
def test_temperature_to_high_precision(temperature: float) -> None:
    """Against 50 digits: float64 to 1e-14 relative, float32 to 1e-5."""
    logits = torch.randn(1, 200) * 5
    with localcontext() as context:
        context.prec = 50
        scaled = [Decimal(x) / Decimal(temperature) for x in logits[0].tolist()]
        weights = [(x - max(scaled)).exp() for x in scaled]
        expected = torch.tensor([[float(w / sum(weights)) for w in weights]], dtype=torch.float64)
    exact = compute_probs(logits.double(), params([temperature]))
    torch.testing.assert_close(exact, expected, rtol=2e-14, atol=1e-300)
    single = compute_probs(logits, params([temperature]))
    torch.testing.assert_close(single.double(), expected, rtol=2e-5, atol=1e-38)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 30) * 3).to(dtype)
    values = random_parameters(4, 30, 1)
    probs = compute_probs(logits, params(*values))
    assert probs.dtype == torch.float32
    assert torch.equal(probs, compute_probs(logits.float(), params(*values)))


def test_masked_ids_never_get_mass() -> None:
    """Padding rows of the vocabulary, even where their logits are the largest."""
    num_rows, vocab_size, num_padding = 120, 64, 13
    values = random_parameters(num_rows, vocab_size, 9)
    logits = torch.randn(num_rows, vocab_size)
    logits[:, -num_padding:] = 50.0
    allowed = torch.arange(vocab_size) < vocab_size - num_padding
    probs = compute_probs(logits, params(*values, allowed_mask=allowed))
    assert (probs[:, ~allowed] == 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(num_rows))
    short = compute_probs(logits[:, allowed].contiguous(), params(*values))
    torch.testing.assert_close(probs[:, allowed], short)
    highest = torch.full((num_rows,), 1 - 2.0**-53, dtype=torch.float64)
    assert (sample_from_probs(probs, highest) < vocab_size - num_padding).all()
    by_row = allowed.expand(num_rows, -1).clone()
    by_row[3] = False
    by_row[3, 40] = True
    probs = compute_probs(logits, params(*values, allowed_mask=by_row))
    assert probs[3].nonzero().tolist() == [[40]]


@pytest.mark.parametrize("where", ["all", "one"])
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(
    "values",
    [
        ([0.0] * 3, [0] * 3, [1.0] * 3, [0.0] * 3),
        ([1.0] * 3, [0] * 3, [1.0] * 3, [0.0] * 3),
        ([0.5] * 3, [2] * 3, [0.9] * 3, [0.1] * 3),
        ([0.5] * 3, [0] * 3, [0.9] * 3, [0.0] * 3),
        ([0.0, 0.5, 1.0], [0, 1, 2], [1.0, 0.5, 0.9], [0.1, 0.0, 0.0]),
        ([1.0, 0.0, 1.0], [5, 0, 0], [1.0, 1.0, 0.9], [0.1, 0.0, 0.0]),
    ],
)
def test_row_that_is_not_finite_is_nan_throughout_and_alone(
    values: tuple[list[float], list[int], list[float], list[float]], value: float, where: str
) -> None:
    logits = torch.randn(3, 20)
    healthy = compute_probs(logits, params(*values))
    logits[1, slice(None) if where == "all" else 7] = value
    probs = compute_probs(logits, params(*values))
    assert probs[1].isnan().all()
    assert torch.equal(probs[::2], healthy[::2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_any_id_is_nan(temperature: float) -> None:
    logits = torch.randn(2, 20)
    logits[0] = -torch.inf
    probs = compute_probs(logits, params([temperature] * 2, top_k=[3] * 2, top_p=[0.9] * 2))
    assert probs[0].isnan().all()
    assert probs[1].isfinite().all()
    logits = torch.randn(2, 20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[1] = True
    probs = compute_probs(logits, params([temperature] * 2, allowed_mask=mask))
    assert probs[0].isnan().all()
    assert probs[1].isfinite().all()


def test_logits_of_minus_infinity_are_ids_of_probability_zero() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])
    probs = compute_probs(logits, params([1.0], top_k=[3], top_p=[0.99]))
    assert probs[0].nonzero().flatten().tolist() == [1, 2]


def test_logits_are_not_changed() -> None:
    values = random_parameters(30, 40, 3)
    for temperature in (values[0], [0.0] * 30):
        logits = torch.randn(30, 40)
        before = logits.clone()
        compute_probs(logits, params(temperature, *values[1:]))
        assert torch.equal(logits, before)


class FullPasses(TorchDispatchMode):
    """Lists the sorting operations that run over a whole vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        name = func.overloadpacket.__name__
        if name in ("sort", "topk") and args[0].shape[-1] == self.vocab_size:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "names"),
    [
        ([0.0, 0.0], [5, 5], [0.5, 0.5], []),
        ([1.0, 0.0], [0, 5], [1.0, 0.5], []),
        ([1.0, 1.0], [5, 0], [1.0, 1.0], ["topk"]),
        ([1.0, 1.0], [5, 0], [0.9, 1.0], ["topk"]),
        ([1.0, 1.0], [5, 0], [1.0, 0.9], ["sort"]),
        ([1.0, 1.0], [5, 300], [0.9, 0.9], ["sort"]),
        ([1.0, 1.0], [5, 500], [1.0, 1.0], ["sort"]),
        ([1.0, 1.0], [0, 0], [1.0, 0.9], ["sort"]),
    ],
)
def test_passes_that_no_row_needs_are_left_out(
    temperature: list[float], top_k: list[int], top_p: list[float], names: list[str]
) -> None:
    """The vocabulary is sorted only where a sampled row uses top_p without a small top_k."""
    with FullPasses(400) as passes:
        compute_probs(torch.randn(2, 400), params(temperature, top_k, top_p))
    assert passes.names == names


def test_never_waits_for_the_device_nor_leaves_it() -> None:
    """On meta tensors an `.item()`, a shape that hangs on values, or another device raises."""
    with torch.device("meta"):
        logits, mask = torch.randn(4, 30), torch.ones(30, dtype=torch.bool)
    values = ([0.0, 1.0, 0.5, 2.0], [0, 2, 5, 0], [1.0, 0.9, 1.0, 0.5], [0.0, 0.1, 0.0, 0.0])
    on_meta = SamplingTensors.from_values(*values, device="meta", allowed_mask=mask)
    assert compute_probs(logits, on_meta).device.type == "meta"
    index = torch.zeros(7, dtype=torch.int64, device="meta")
    assert compute_probs(logits[index], on_meta.rows(index)).shape == (7, 30)
