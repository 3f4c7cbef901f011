"""Which positions are selected: by masks and lists over a batch, against the definition."""

import itertools

import pytest
import torch
from torch import Tensor

from outrider.ops.sparse_attention import (
    index_scores,
    select_blocks,
    select_blocks_naive,
    selected_positions,
    selected_positions_naive,
    selection_mask,
)
from tests.tolerances import assert_near

Selection = list[set[int]]


def positions_by_definition(
    scores: list[float], position: int, ratio: int, num_selected: int
) -> set[int]:
    """Blocks of the best scores among the complete ones, and the tail."""
    complete = (position + 1) // ratio
    chosen = select_blocks_naive(scores[:complete], num_selected)
    inside = {block * ratio + i for block in chosen for i in range(ratio)}
    return inside | set(range(complete * ratio, position + 1))


def both_forms(
    scores: Tensor, positions: Tensor, ratio: int, num_selected: int
) -> tuple[Selection, Selection]:
    """Selections of [L] queries as sets: from the list of positions, and from the mask."""
    is_selected, _ = select_blocks(scores[None], positions[None], ratio, num_selected)
    listed, is_listed = selected_positions(is_selected, positions[None], ratio, num_selected)
    num_keys = int(positions.max()) + 1
    mask = selection_mask(is_selected, positions[None], ratio, num_keys)
    assert listed.shape == is_listed.shape
    assert listed.shape[-1] == num_selected * ratio + ratio - 1
    assert (listed[~is_listed] == 0).all()
    lists = [row[used].tolist() for row, used in zip(listed[0], is_listed[0], strict=True)]
    assert all(len(one) == len(set(one)) for one in lists), "a position is listed twice"
    return [set(one) for one in lists], [set(row.nonzero().flatten().tolist()) for row in mask[0]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("levels", [1, 2, 3, 1000])
@pytest.mark.parametrize(("ratio", "num_selected"), [(1, 3), (2, 1), (4, 2), (4, 4), (3, 50)])
def test_equals_the_definition(ratio: int, num_selected: int, levels: int, seed: int) -> None:
    """Scores of few levels tie often, those of one level always; all places are queried."""
    torch.manual_seed(seed)
    num_keys = 41
    scores = torch.randint(levels, (num_keys, num_keys // ratio)).float()
    positions = torch.arange(num_keys)
    expected = [
        positions_by_definition(scores[p].tolist(), p, ratio, num_selected) for p in range(num_keys)
    ]
    lists, masks = both_forms(scores, positions, ratio, num_selected)
    assert lists == expected
    assert masks == expected


def test_places_of_a_ragged_batch() -> None:
    """Requests of different length: blocks that one has not completed are not selected."""
    scores = torch.randint(3, (2, 3, 9)).float()
    positions = torch.tensor([[34, 35, 36], [7, 8, 9]])
    is_selected, _ = select_blocks(scores, positions, 4, 2)
    mask = selection_mask(is_selected, positions, 4, 37)
    listed, is_listed = selected_positions(is_selected, positions, 4, 2)
    for b, i in itertools.product(range(2), range(3)):
        expected = positions_by_definition(scores[b, i].tolist(), int(positions[b, i]), 4, 2)
        assert set(mask[b, i].nonzero().flatten().tolist()) == expected
        assert set(listed[b, i][is_listed[b, i]].tolist()) == expected


def test_of_equal_scores_the_lowest_block_wins() -> None:
    positions = torch.tensor([[23]])
    for scores, chosen in (
        ([0.0] * 6, [0, 1]),
        ([1.0, 2.0, 2.0, 2.0, 0.0, 2.0], [1, 2]),
        ([2.0, 0.0, 0.0, 0.0, 0.0, 3.0], [0, 5]),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 3.0], [0, 5]),
    ):
        is_selected, margin = select_blocks(torch.tensor([[scores]]), positions, 4, 2)
        assert is_selected[0, 0].nonzero().flatten().tolist() == chosen
        assert select_blocks_naive(scores, 2) == chosen
        ordered = sorted(scores, reverse=True)
        # Blocks that no head looks at are no near-tie, however they are told apart.
        assert margin.item() == (ordered[1] - ordered[2] if ordered[1] else torch.inf)


def test_margin_is_infinite_where_nothing_is_refused() -> None:
    scores = torch.rand(1, 30, 7)
    positions = torch.arange(30)[None]
    _, margin = select_blocks(scores, positions, 4, 3)
    # The fourth block is complete with position 15.
    assert margin[0, :15].isinf().all()
    assert margin[0, 15:].isfinite().all()
    assert select_blocks(scores[..., :3], positions, 4, 3)[1].isinf().all()


@pytest.mark.parametrize(("ratio", "num_selected"), [(4, 2), (2, 5), (4, 1)])
def test_everything_is_selected_up_to_the_budget_and_a_tail(ratio: int, num_selected: int) -> None:
    """Dense while n <= budget + r - 1 positions are visible, and sparse at the next one."""
    last_dense = num_selected * ratio + ratio - 2
    num_keys = last_dense + 2
    positions = torch.arange(num_keys)
    scores = torch.rand(num_keys, num_keys // ratio)
    for selection in both_forms(scores, positions, ratio, num_selected):
        for p in range(last_dense + 1):
            assert selection[p] == set(range(p + 1))
        assert len(selection[last_dense + 1]) == num_selected * ratio


def test_a_query_may_not_see_itself() -> None:
    """At the end of a block the tail is empty, and its block must win like any other."""
    scores = torch.tensor([[1.0, 2.0, 0.0]])
    for selection in both_forms(scores, torch.tensor([11]), 4, 1):
        assert selection == [{4, 5, 6, 7}]
    for selection in both_forms(scores, torch.tensor([10]), 4, 1):
        assert selection == [{4, 5, 6, 7, 8, 9, 10}]


def test_before_the_first_block_there_is_only_the_tail() -> None:
    for selection in both_forms(torch.zeros(3, 0), torch.arange(3), 4, 2):
        assert selection == [{0}, {0, 1}, {0, 1, 2}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores(dtype: torch.dtype) -> None:
    queries, keys = torch.randn(2, 5, 4, 6, dtype=dtype), torch.randn(2, 9, 6, dtype=dtype)
    scores = index_scores(queries, keys)
    assert scores.dtype == dtype
    for b, i, block in itertools.product(range(2), range(5), range(9)):
        dots = [float(queries[b, i, head] @ keys[b, block]) for head in range(4)]
        expected = sum(max(dot, 0.0) for dot in dots) / 6**0.5
        assert scores[b, i, block].item() == pytest.approx(expected, abs=1e-5)


def test_scores_of_half_precision_are_float32() -> None:
    queries = torch.randn(1, 3, 4, 6, dtype=torch.bfloat16)
    keys = torch.randn(1, 5, 6, dtype=torch.bfloat16)
    scores = index_scores(queries, keys)
    assert scores.dtype == torch.float32
    assert_near(scores, index_scores(queries.float(), keys.float()))


@pytest.mark.parametrize(("ratio", "budget"), [(4, 8), (2, 6), (3, 3)])
def test_from_keys_to_positions(ratio: int, budget: int) -> None:
    """Pooling, scoring and selecting, against one query at a time."""
    num_keys, heads, dim = 30, 4, 6
    queries = torch.randn(num_keys, heads, dim, dtype=torch.float64)
    raw_keys = torch.randn(num_keys, dim, dtype=torch.float64)

    def pool(mean: Tensor, first: int) -> Tensor:
        return torch.tanh(mean * (1 + 0.1 * first))

    blocks = raw_keys[: num_keys // ratio * ratio].unflatten(0, (-1, ratio)).mean(1)
    pooled = torch.stack([pool(mean, c * ratio) for c, mean in enumerate(blocks)])
    scores = index_scores(queries[None], pooled[None])[0]
    expected = [
        set(selected_positions_naive(p, queries[p], raw_keys, pool, ratio, budget))
        for p in range(num_keys)
    ]
    for selection in both_forms(scores, torch.arange(num_keys), ratio, budget // ratio):
        assert selection == expected
