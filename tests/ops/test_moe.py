"""Routing and the routed experts in both of their forms, against one row and expert at a time."""

import pytest
import torch
from torch import Tensor

from outrider.ops.moe import (
    route,
    routed_experts,
    routed_experts_dense,
    routed_experts_gathered,
    routed_experts_grouped,
    routed_experts_naive,
)
from tests.tolerances import assert_near

C, I = 6, 5  # noqa: E741 - widths of a row and of an expert, as in the reference
DTYPES = [torch.float32, torch.float64]


def random_weights(num_experts: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(num_experts, 2 * I, C, dtype=dtype),
        torch.randn(num_experts, C, I, dtype=dtype),
    )


def random_choice(
    num_rows: int, num_experts: int, k: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    ids, weights, _ = route(torch.randn(num_rows, num_experts, dtype=dtype), k, normalise=True)
    return ids, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (3, 2), (8, 3), (7, 7)])
def test_route(num_experts: int, k: int, normalise: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(33, num_experts, dtype=dtype) * 3
    ids, weights, margin = route(logits, k, normalise=normalise)
    assert ids.dtype == torch.int64
    assert weights.dtype == dtype
    for t, row in enumerate(logits.softmax(-1).tolist()):
        order = sorted(range(num_experts), key=lambda expert: (-row[expert], expert))
        assert ids[t].tolist() == order[:k]
        total = sum(row[expert] for expert in order[:k]) if normalise else 1.0
        expected = torch.tensor([row[expert] / total for expert in order[:k]], dtype=dtype)
        assert_near(weights[t], expected)
        gap = row[order[k - 1]] - row[order[k]] if k < num_experts else torch.inf
        assert margin[t].item() == pytest.approx(gap, abs=1e-6)


def test_of_equal_probabilities_the_lowest_expert_wins() -> None:
    logits = torch.tensor([[0.0] * 6, [1, 2, 2, 2, 0, 2], [5, 5, 0, 5, 5, 0]])
    ids, weights, margin = route(logits, 2, normalise=True)
    assert ids.tolist() == [[0, 1], [1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5]] * 3
    assert margin.tolist() == [0.0] * 3
    # Far more experts than any sort keeps in order by chance.
    ids, _, _ = route(torch.zeros(3, 500), 10, normalise=False)
    assert ids.tolist() == [list(range(10))] * 3


def test_half_precision_is_routed_in_float32() -> None:
    # In bfloat16 both probabilities are 0.25.
    logits = torch.tensor([[1.0, 1.0078125, 1.0, 1.0]], dtype=torch.bfloat16)
    ids, weights, margin = route(logits, 1, normalise=False)
    assert ids.tolist() == [[1]]
    assert weights.dtype == torch.bfloat16
    assert margin.dtype == torch.float32
    assert margin.item() > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 40])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (3, 2), (16, 4), (4, 4)])
def test_both_forms_equal_the_loop(
    num_experts: int, k: int, num_rows: int, dtype: torch.dtype
) -> None:
    hidden = torch.randn(num_rows, C, dtype=dtype)
    choice = random_choice(num_rows, num_experts, k, dtype)
    weights = random_weights(num_experts, dtype)
    expected = routed_experts_naive(hidden, *choice, *weights)
    for form in (
        routed_experts_dense,
        routed_experts_gathered,
        routed_experts_grouped,
        routed_experts,
    ):
        output = form(hidden, *choice, *weights)
        assert output.dtype == dtype
        assert_near(output, expected)


def test_experts_without_rows() -> None:
    hidden = torch.randn(9, C, dtype=torch.float64)
    ids = torch.tensor([[1, 6]] * 5 + [[6, 1]] * 4)  # 0, 2..5 and 7 have none
    share = torch.rand(9, 2, dtype=torch.float64)
    weights = random_weights(8)
    for expert in (0, 2, 3, 4, 5, 7):
        for matrix in weights:
            matrix[expert] = torch.nan
    expected = routed_experts_naive(hidden, ids, share, *weights)
    assert not expected.isnan().any()
    for form in (routed_experts_dense, routed_experts_gathered, routed_experts_grouped):
        assert_near(form(hidden, ids, share, *weights), expected)


def test_the_cheaper_form_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    for name in ("dense", "gathered", "grouped"):
        monkeypatch.setattr(
            f"outrider.ops.moe.experts.routed_experts_{name}",
            lambda *args, name=name: chosen.append(name),
        )

    def choose(num_rows: int, num_experts: int, device: str = "cpu") -> None:
        tensors = (
            torch.randn(num_rows, C),
            *random_choice(num_rows, num_experts, 2, torch.float32),
            *random_weights(num_experts, torch.float32),
        )
        routed_experts(*(tensor.to(device) for tensor in tensors))

    choose(1, 8)
    choose(32, 8)
    choose(33, 8)
    choose(1, 9)
    choose(9, 9, "meta")  # a device whose counts would have to be waited for
    choose(10, 9, "meta")
    assert chosen == ["dense", "dense", "grouped", "grouped", "gathered", "grouped"]


@pytest.mark.parametrize(
    "form", [routed_experts_dense, routed_experts_grouped, routed_experts_gathered]
)
def test_gradients_equal_those_of_the_loop(form: object) -> None:
    hidden = torch.randn(11, C, dtype=torch.float64)
    ids, share = random_choice(11, 5, 2)
    ids = ids.masked_fill(ids == 3, 4)  # one expert has no row, so no gradient
    factor = torch.randn(11, C, dtype=torch.float64)
    weights = random_weights(5)

    def gradients(function: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, share, *weights)]
        output = function(leaves[0], ids, *leaves[1:])  # type: ignore[operator]
        (output * factor).sum().backward()
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    actual, expected = gradients(form), gradients(routed_experts_naive)
    for one, other in zip(actual, expected, strict=True):
        assert_near(one, other)
    assert (actual[2][3] == 0).all()


def test_gradient_of_the_router() -> None:
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)

    def share(values: Tensor) -> Tensor:
        return route(values, 2, normalise=True)[1]

    assert torch.autograd.gradcheck(share, (logits,))
