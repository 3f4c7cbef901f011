"""Dense attention of training at every draft depth, forward and gradient, against single rows."""

import pytest
import torch
from torch import Tensor

from outrider.ops.sparse_attention import attend_sequence, attend_sequence_naive
from tests.ops.sequence_form import assert_same_gradients
from tests.tolerances import assert_near

B, H, HK, D = 2, 4, 2, 5


def random_rows(length: int, num_depths: int) -> list[Tensor]:
    heads = [H, *[HK] * 2 * num_depths]
    return [torch.randn(B, length, h, D, dtype=torch.float64) for h in heads]


@pytest.mark.parametrize("length", [1, 2, 7, 127, 129, 150])
@pytest.mark.parametrize("depths", [[0], [0, 1], [0, 1, 2], [1], [0, 2], [1, 3]])
def test_it_equals_single_rows(length: int, depths: list[int]) -> None:
    number = len(depths)

    def attend(query: Tensor, *rows: Tensor) -> Tensor:
        output, mass = attend_sequence(query, rows[:number], rows[number:], depths)
        assert mass is None
        return output[:, depths[-1] :]

    def naive(query: Tensor, *rows: Tensor) -> Tensor:
        outputs = []
        for b in range(B):
            keys, values = [x[b] for x in rows[:number]], [x[b] for x in rows[number:]]
            outputs.append(attend_sequence_naive(query[b], keys, values, depths))
        return torch.stack(outputs)[:, depths[-1] :]

    if length > depths[-1]:
        assert_same_gradients(attend, naive, random_rows(length, number), torch.float64)


@pytest.mark.parametrize("length", [3, 8, 130])
@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_mass_is_the_mean_probability_of_each_block(length: int, ratio: int) -> None:
    query, key, value = random_rows(length, 1)
    output, mass = attend_sequence(query, [key], [value], [0], ratio)
    assert mass is not None
    assert mass.shape == (B, length, length // ratio)
    assert not mass.requires_grad
    folded = key.repeat_interleave(H // HK, dim=2)
    logits = torch.einsum("bthd,bshd->bhts", query, folded) * D**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    probs = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)
    for block in range(length // ratio):
        rows = slice(block * ratio, (block + 1) * ratio)
        assert_near(mass[:, rows.stop - 1 :, block], probs[:, rows.stop - 1 :, rows].sum(-1))
    assert_near(output, attend_sequence(query, [key], [value], [0])[0])


def test_rows_without_predecessor_touch_no_other() -> None:
    """Rows p < j of depth j are made of the end of the sequence: NaN there must stay there."""
    rows = random_rows(9, 3)
    keys, values = rows[1:4], rows[4:]
    expected, _ = attend_sequence(rows[0], keys, values, [0, 1, 2])
    for depth in (1, 2):
        keys[depth][:, :depth] = torch.nan
        values[depth][:, :depth] = torch.nan
    actual, _ = attend_sequence(rows[0], keys, values, [0, 1, 2])
    assert_near(actual[:, 2:], expected[:, 2:])
