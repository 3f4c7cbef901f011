"""The cache manager: what it allocates, how it lays out a pass, what it takes back."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.batch import NULL_BLOCK_ID, RowSpan, Window
from outrider.cache.cache_manager import CacheManager
from outrider.cache.groups import GroupSpec, Rollback, TensorSpec
from outrider.models.qwen4_exp.cache_specs import TARGET_ATTENTION, TARGET_INDEX, cache_specs
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from tests.tiny_engine import TINY

CPU = torch.device("cpu")
BLOCK_SIZE, RATIO, DENSE_LIMIT = 8, 4, 11
PAGED = (TARGET_ATTENTION, TARGET_INDEX)
NO_CONTEXT: tuple[int, ...] = ()


def make_manager(num_pending_rows: int = 3, **options: Any) -> CacheManager:
    config = Qwen4ExpConfig(**TINY)
    assert config.indexer_compress_ratio == RATIO
    defaults = {"num_blocks": 24, "max_num_seqs": 4, "max_model_len": 64, "dtype": torch.float64}
    return CacheManager(
        cache_specs(config, 1, num_pending_rows),
        block_size=BLOCK_SIZE,
        num_pending_rows=num_pending_rows,
        device=CPU,
        **{**defaults, **options},
    )


def plan(
    manager: CacheManager, spans: list[RowSpan], **options: Any
) -> tuple[list[int], dict[str, Tensor], tuple[Window, ...]]:
    positions, slot_mapping, windows = manager.plan(
        spans, PAGED, [NO_CONTEXT] * len(spans), **options
    )
    return positions.tolist(), slot_mapping, windows


def slot_of(manager: CacheManager, name: str, row: int, position: int) -> int:
    """Where a position lies; in the null block past the end of what the request holds."""
    blocks = manager.block_tables[name].blocks(row)
    number = position // BLOCK_SIZE
    block = blocks[number] if number < len(blocks) else NULL_BLOCK_ID
    return block * BLOCK_SIZE + position % BLOCK_SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drafts_cost_a_request_the_inputs_of_their_rows_alone(dtype: torch.dtype) -> None:
    """K = 8 against K = 1: seven rows of inputs in each recurrent layer, and no state more."""
    config = Qwen4ExpConfig(**TINY)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    # Per row and delta-net layer: the columns before the convolution, key, value, decay and beta.
    columns = 2 * keys + values
    delta_net = columns + keys + values + 2 * config.linear_num_value_heads
    ngram = config.hc_count * config.hidden_size
    per_row = (
        len(config.linear_layer_indices) * delta_net + len(config.ple_layer_indices) * ngram
    ) * dtype.itemsize
    one, eight = (make_manager(k, max_num_seqs=5, dtype=dtype) for k in (1, 8))
    assert eight.num_bytes() - one.num_bytes() == 7 * per_row * 5
    for manager in (one, eight):
        allocated = [
            tensor.untyped_storage().nbytes()
            for group in manager.groups.values()
            for tensor in group.tensors.values()
        ]
        assert manager.num_bytes() == sum(allocated)
    for name, group in one.groups.items():
        if group.spec.is_paged:
            assert group.num_bytes == eight.groups[name].num_bytes
    states = [manager.groups["delta_net"].tensors["recurrent"] for manager in (one, eight)]
    assert states[0].shape == states[1].shape, "one committed state a request, whatever K is"
    assert states[0].shape[1] == 5
    zero = make_manager(0, max_num_seqs=5, dtype=dtype)
    assert one.num_bytes() - zero.num_bytes() == per_row * 5


def test_positions_slots_and_windows_of_a_ragged_pass() -> None:
    manager = make_manager(num_pending_rows=3)
    rows = [manager.allocate(n) for n in (20, 9, 40, 12)]
    # Two windows of drafts, a piece of a prompt longer than any, and one of the length of one.
    spans = [
        RowSpan(rows[2], 5, 4, 3),
        RowSpan(rows[0], 0, 13, 0),
        RowSpan(rows[1], 7, 2, 1),
        RowSpan(rows[3], 2, 1, 0),
    ]
    for span, kept in zip(spans, (2, 0, 1, 0), strict=True):
        manager.commit([RowSpan(span.row, 0, 4, 3)], [kept])
    positions, slot_mapping, (short, alone) = plan(manager, spans)
    assert positions == [5, 6, 7, 8, *range(13), 7, 8, 2]
    owners = [span.row for span in spans for _ in range(span.num_rows)]
    for name in PAGED:
        expected = [slot_of(manager, name, *at) for at in zip(owners, positions, strict=True)]
        assert slot_mapping[name].tolist() == expected
        assert len(set(expected)) == len(expected)
    assert short.request_index.tolist() == [0, 2, 3]
    assert short.row_index.tolist() == [[0, 1, 2, 3], [17, 18, 18, 18], [19, 19, 19, 19]]
    assert short.positions.tolist() == [[5, 6, 7, 8], [7, 8, 8, 8], [2, 2, 2, 2]]
    assert short.is_row.sum(1).tolist() == [4, 2, 1]
    assert short.num_certain_rows.tolist() == [1, 1, 1]
    assert short.num_kept_rows.tolist() == [2, 1, 0]
    assert (short.max_seq_len, short.has_pending, short.is_contiguous) == (9, True, False)
    assert alone.request_index.tolist() == [1]
    assert alone.row_index.tolist() == [list(range(4, 17))]
    assert (alone.max_seq_len, alone.has_pending, alone.is_contiguous) == (13, False, False)
    for window in (short, alone):
        for name in PAGED:
            for request, slots in zip(window.request_index, window.paged[name].slots, strict=True):
                row = spans[request].row
                expected = [slot_of(manager, name, row, p) for p in range(window.max_seq_len)]
                assert slots.tolist() == expected


def test_what_a_request_does_not_hold_is_the_null_block() -> None:
    """A short request in the window of a long one; nobody's row is ever written there."""
    manager = make_manager()
    short, long = manager.allocate(6), manager.allocate(40)
    _, slot_mapping, (window,) = plan(manager, [RowSpan(short, 3, 1, 0), RowSpan(long, 35, 2, 1)])
    for name in PAGED:
        slots = window.paged[name].slots
        assert (slots[0, :6] >= BLOCK_SIZE).all()
        assert (slots[0, 8:] // BLOCK_SIZE == NULL_BLOCK_ID).all()
        assert (slots[1] // BLOCK_SIZE != NULL_BLOCK_ID).all()
        assert (slot_mapping[name] // BLOCK_SIZE != NULL_BLOCK_ID).all()


def test_rows_that_are_in_order_are_viewed() -> None:
    manager = make_manager()
    a, b = manager.allocate(20), manager.allocate(20)
    _, _, (even,) = plan(manager, [RowSpan(a, 0, 2, 1), RowSpan(b, 4, 2, 1)])
    rows = torch.randn(4, 3)
    assert even.is_contiguous
    assert even.gather(rows).data_ptr() == rows.data_ptr()
    _, _, (ragged,) = plan(manager, [RowSpan(a, 0, 2, 1), RowSpan(b, 4, 1, 0)])
    assert not ragged.is_contiguous


@pytest.mark.parametrize("is_strided", [False, True])
def test_gather_and_scatter(is_strided: bool) -> None:
    """Rows go to their requests and back; padding repeats a row and comes back nowhere."""
    manager = make_manager()
    rows_of = [manager.allocate(20) for _ in range(4)]
    rng = random.Random(0)
    for _ in range(20):
        counts = [rng.choice([1, 2, 3, 4, 5, 9]) for _ in range(rng.randint(1, 4))]
        spans = [RowSpan(row, 0, n, 0) for row, n in zip(rows_of, counts, strict=False)]
        _, _, windows = plan(manager, spans)
        total = sum(counts)
        rows = torch.randn(total, 3)
        if is_strided:
            rows = torch.stack([rows, torch.full_like(rows, torch.nan)], 1).flatten(1)[:, :3]
            assert total == 1 or not rows.is_contiguous()
        back = None
        for window in windows:
            padded = window.gather(rows)
            last = padded.gather(1, (window.is_row.sum(1) - 1)[:, None, None].expand(-1, -1, 3))
            assert torch.equal(torch.where(window.is_row[..., None], padded, last), padded), (
                "padding repeats the last row"
            )
            poisoned = torch.where(window.is_row[..., None], padded, torch.nan)
            back = window.scatter(poisoned, back, total)
        assert back is not None
        assert torch.equal(back, rows)


class PooledModel:
    """Which pooled blocks of a request are formed from the keys that lie there, by definition."""

    def __init__(self) -> None:
        self.version: dict[int, int] = {}  # position -> pass that wrote its raw key
        self.formed: dict[int, tuple[int, ...]] = {}  # block -> versions it was formed from

    def versions(self, block: int) -> tuple[int, ...]:
        return tuple(self.version[block * RATIO + i] for i in range(RATIO))


@pytest.mark.parametrize("seed", range(6))
def test_pooled_blocks_are_formed_anew_where_a_raw_key_changed(seed: int) -> None:
    """Any mix of windows, rejections and lengths: what is read was formed from what is there."""
    manager, rng = make_manager(num_pending_rows=8, num_blocks=40), random.Random(seed)
    rows = [manager.allocate(64) for _ in range(3)]
    models, lengths = [PooledModel() for _ in rows], [0, 0, 0]
    for turn in range(30):
        members = [i for i in range(3) if lengths[i] < 50 and rng.random() < 0.8]
        if not members:
            continue
        counts = [rng.choice([1, 2, 5, 9]) for _ in members]
        spans = [RowSpan(rows[i], lengths[i], n, 0) for i, n in zip(members, counts, strict=True)]
        _, _, (window,) = plan(manager, spans)
        for i, n in zip(members, counts, strict=True):
            models[i].version |= dict.fromkeys(range(lengths[i], lengths[i] + n), turn)
        if window.max_seq_len > DENSE_LIMIT:
            check_rebuild(manager, window, [rows[i] for i in members], [models[i] for i in members])
            for place, (i, n) in enumerate(zip(members, counts, strict=True)):
                for block in range((lengths[i] + n) // RATIO):
                    assert models[i].formed[block] == models[i].versions(block), (turn, place)
        else:
            view = window.paged[TARGET_INDEX]
            assert view.rebuild is None
            assert view.pooled_slots is None
        for i, n in zip(members, counts, strict=True):
            lengths[i] += rng.randint(1, n)
    assert min(lengths) > DENSE_LIMIT


def check_rebuild(
    manager: CacheManager, window: Window, rows: list[int], models: list[PooledModel]
) -> None:
    """Applies a rebuild to the models, and checks its slots."""
    view = window.paged[TARGET_INDEX]
    assert view.rebuild is not None
    assert view.pooled_slots is not None
    work = view.rebuild
    for place, (row, model) in enumerate(zip(rows, models, strict=True)):
        for block, raw, pooled in zip(
            work.blocks[place].tolist(),
            work.raw_slots[place].tolist(),
            work.pooled_slots[place].tolist(),
            strict=True,
        ):
            first = slot_of(manager, TARGET_INDEX, row, block * RATIO)
            assert raw == list(range(first, first + RATIO))
            if pooled * RATIO // BLOCK_SIZE == NULL_BLOCK_ID:
                assert block == 0, "what is surplus goes to the null block"
                continue
            assert pooled == first // RATIO == int(view.pooled_slots[place, block])
            model.formed[block] = model.versions(block)


def test_few_blocks_are_formed_anew() -> None:
    """Once formed, a block far behind the window is left alone."""
    manager = make_manager(num_pending_rows=8)
    row = manager.allocate(64)
    _, _, (window,) = plan(manager, [RowSpan(row, 0, 40, 0)])
    assert window.paged[TARGET_INDEX].rebuild is not None
    for start in (40, 41, 44, 43):
        _, _, (window,) = plan(manager, [RowSpan(row, start, 9, 8)])
        rebuild = window.paged[TARGET_INDEX].rebuild
        assert rebuild is not None
        assert rebuild.blocks.tolist() == [list(range(start // RATIO, (start + 9) // RATIO))]
    # A pass that reads no index forms none, and forgets those it has overwritten.
    plan(manager, [RowSpan(row, 30, 1, 0)], reads_index=False)
    _, _, (window,) = plan(manager, [RowSpan(row, 31, 1, 0)])
    rebuild = window.paged[TARGET_INDEX].rebuild
    assert rebuild is not None
    assert rebuild.blocks.tolist() == [[7]]


def test_a_new_request_finds_nothing_of_the_old() -> None:
    """Not in its states, its counts or the blocks that come back: not even NaN."""
    manager = make_manager(num_blocks=5, max_num_seqs=1)
    row = manager.allocate(40)
    manager.commit([RowSpan(row, 0, 4, 3)], [2])
    plan(manager, [RowSpan(row, 0, 40, 0)])
    for group in manager.groups.values():
        for tensor in group.tensors.values():
            tensor.fill_(torch.nan)
    clean_null_blocks(manager)
    manager.free(row)
    assert manager.allocate(40) == row
    assert manager.num_kept_rows(row) == 0
    for group in manager.groups.values():
        for name, tensor in group.tensors.items():
            assert (tensor == 0).all(), name
    _, _, (window,) = plan(manager, [RowSpan(row, 0, 20, 0)])
    rebuild = window.paged[TARGET_INDEX].rebuild
    assert rebuild is not None
    assert rebuild.blocks.tolist() == [list(range(5))]


def clean_null_blocks(manager: CacheManager) -> None:
    slots = torch.arange(BLOCK_SIZE)
    for name in manager.block_tables:
        manager.groups[name].clear(slots)


def test_commit_takes_no_more_than_ran() -> None:
    manager = make_manager()
    row = manager.allocate(10)
    for accepted in (-1, 3):
        with pytest.raises(AssertionError, match="more drafts accepted than ran"):
            manager.commit([RowSpan(row, 0, 3, 2)], [accepted])
    manager.commit([RowSpan(row, 0, 3, 2)], [2])
    assert manager.num_kept_rows(row) == 2
    manager.mark_materialized(row)
    assert manager.num_kept_rows(row) == 0


def test_groups_without_layers_take_no_part() -> None:
    spec = GroupSpec("only", False, 2, (TensorSpec("state", (3,), Rollback.REPLAY),))
    manager = CacheManager(
        [spec],
        block_size=4,
        num_blocks=2,
        max_num_seqs=2,
        max_model_len=8,
        num_pending_rows=1,
        dtype=torch.float32,
        device=CPU,
    )
    rows = [manager.allocate(100), manager.allocate(100)]
    positions, slot_mapping, (window,) = manager.plan(
        [RowSpan(rows[1], 3, 2, 1)], ["only", "other"], [(7, 8)]
    )
    assert positions.tolist() == [3, 4]
    assert slot_mapping == {}
    assert window.context_ids.tolist() == [[7, 8]]
    expected = manager.state_pools["only"].slots(np.array([rows[1]])).tolist()
    assert window.state_slots["only"].tolist() == expected
