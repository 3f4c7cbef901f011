"""Attention by mask and over lists, against one query at a time."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from outrider.ops.sparse_attention import attend, attend_listed, attention_naive, causal_mask
from tests.tolerances import assert_near

B, D = 2, 6
HEADS = [(1, 1), (2, 2), (4, 2), (6, 1), (6, 3)]
DTYPES = [torch.float32, torch.float64]


def random_inputs(
    length: int, num_keys: int, heads: tuple[int, int], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(B, length, heads[0], D, dtype=dtype),
        torch.randn(B, num_keys, heads[1], D, dtype=dtype),
        torch.randn(B, num_keys, heads[1], D, dtype=dtype),
    )


def random_mask(length: int, num_keys: int) -> Tensor:
    mask = torch.rand(B, length, num_keys) < 0.4
    mask[..., 0] |= ~mask.any(-1)
    return mask


def by_definition(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[b, L, H, D] over keys [b, N, Hk, D]."""
    return torch.stack(
        [
            torch.stack(
                [
                    attention_naive(
                        query[b, i], keys[b], values[b], mask[b, i].nonzero().flatten().tolist()
                    )
                    for i in range(query.shape[1])
                ]
            )
            for b in range(query.shape[0])
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "num_keys"), [(1, 1), (1, 9), (5, 3), (4, 17)])
@pytest.mark.parametrize("heads", HEADS)
def test_masked(heads: tuple[int, int], length: int, num_keys: int, dtype: torch.dtype) -> None:
    inputs = random_inputs(length, num_keys, heads, dtype)
    mask = random_mask(length, num_keys)
    output = attend(*inputs, mask)
    assert output.dtype == dtype
    assert_near(output, by_definition(*inputs, mask))


@pytest.mark.parametrize("max_elements", [1, 2 * 3 * 17, 2 * 3 * 17 * 2 + 5])
def test_a_large_mask_is_made_in_slices(max_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, mask = random_inputs(7, 17, (6, 2)), random_mask(7, 17)
    expected = attend(*inputs, mask)
    sizes: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, *args: Tensor, attn_mask: Tensor) -> Tensor:
        sizes.append(attn_mask.numel())
        return attention(query, *args, attn_mask=attn_mask)

    # The package has a function of the module's name.
    module = import_module("outrider.ops.sparse_attention.attend")
    monkeypatch.setattr(module, "_MAX_MASK_ELEMENTS", max_elements)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    assert_near(attend(*inputs, mask), expected)
    # A row at least, and of each batch's three query heads that share a key head.
    assert max(sizes) <= max(max_elements, 2 * 3 * 17)
    assert len(sizes) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "num_listed"), [(1, 1), (1, 9), (5, 7)])
@pytest.mark.parametrize("heads", HEADS)
def test_listed(heads: tuple[int, int], length: int, num_listed: int, dtype: torch.dtype) -> None:
    query, keys, values = random_inputs(length, 20, heads, dtype)
    listed = torch.stack([torch.randperm(20)[:num_listed] for _ in range(B * length)]).view(
        B, length, num_listed
    )
    is_listed = random_mask(length, num_listed)
    requests = torch.arange(B)[:, None, None]
    output = attend_listed(query, keys[requests, listed], values[requests, listed], is_listed)
    mask = torch.zeros(B, length, 20, dtype=torch.bool)
    mask.scatter_(2, listed, is_listed)
    assert_near(output, by_definition(query, keys, values, mask))


@pytest.mark.parametrize("heads", HEADS)
def test_strided_inputs(heads: tuple[int, int]) -> None:
    """Queries come as slices of one projection, keys as gathered rows."""
    query, keys, values = random_inputs(5, 9, heads)
    mask = random_mask(5, 9)
    wide = torch.randn(B, 5, heads[0], 2 * D, dtype=torch.float64)
    wide[..., :D] = query
    expected = by_definition(query, keys, values, mask)
    assert_near(attend(wide[..., :D], keys, values, mask), expected)
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert_near(attend(query, turned, values, mask), expected)
    row = slice(2, 3)
    assert_near(attend(wide[:, row, :, :D], turned, values, mask[:, row]), expected[:, row])


def test_what_the_mask_hides_has_no_effect() -> None:
    query, keys, values = random_inputs(4, 9, (4, 2))
    mask = torch.ones(B, 4, 9, dtype=torch.bool)
    mask[..., 3:6] = False
    expected = attend(query, keys, values, mask)
    keys[:, 3:6], values[:, 3:6] = 1e6, -1e6
    assert torch.equal(attend(query, keys, values, mask), expected)


def test_causal_mask() -> None:
    positions = torch.tensor([[0, 2], [4, 9]])
    mask = causal_mask(positions, 5)
    assert mask.int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0]],
        [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    ]


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_gradients_equal_those_of_the_definition(heads: tuple[int, int]) -> None:
    inputs = random_inputs(5, 7, heads)
    mask = random_mask(5, 7)
    factor = torch.randn(B, 5, heads[0], D, dtype=torch.float64)

    def gradients(function: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        (function(*leaves, mask) * factor).sum().backward()  # type: ignore[operator]
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    for actual, expected in zip(gradients(attend), gradients(by_definition), strict=True):
        assert_near(actual, expected)
