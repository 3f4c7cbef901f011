"""The law of rollback, for the target's states: verify K drafts, commit j, go on == feed plainly.

Rows that were refused leave no trace in any kind of state: recurrent, convolution windows, n-gram
context, keys and values, raw and pooled index keys. In float64, where what two shapes of the same
sum differ by is 1e-15, and leaving any one kind stale shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.batch import NULL_BLOCK_ID, RowSpan
from outrider.models.qwen4_exp.cache_specs import DELTA_NET, NGRAM, TARGET_INDEX
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from tests.cache.logical_state import largest_difference, logical_state
from tests.models.feeder import Feeder, Piece
from tests.tiny_engine import VOCAB_SIZE, random_prompts, tiny_model

EXACT = 1e-12
VISIBLE = 1e-2  # what a stale state does to logits of size one at the least; measured: 0.05 to 1
TEXT_LENGTH = 54
WITHIN_BUDGET, PAST_BUDGET = 5, 26  # length of the prompt; the budget is dense up to 11 positions
WINDOWS = [(k, j) for k in range(1, 9) for j in range(k + 1)]


@cache
def model() -> Qwen4ExpForCausalLM:
    # A seed at which each stale index key changes which blocks are selected.
    return tiny_model(seed=2)


@cache
def text(seed: int = 3) -> list[int]:
    return random_prompts([TEXT_LENGTH], seed)[0]


@cache
def plain_run(seed: int = 3) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """States and logits after 1, 2, ... tokens, fed one by one to an engine without drafts."""
    feeder = Feeder(model(), [text(seed)], num_pending_rows=0)
    states, logits = [{}], []
    for _ in text(seed):
        logits.append(feeder.run([Piece(0, 1)])[0][0])
        states.append(logical_state(feeder, 0))
    return states, logits


def window(feeder: Feeder, index: int, k: int, j: int) -> Piece:
    """The next token and K drafts: j that are kept, then K - j that are wrong."""
    right = feeder.left(index)[1 : 1 + j]
    wrong = [(token + 1) % VOCAB_SIZE for token in feeder.left(index)[1 + j : 1 + k]]
    return Piece(index, 1, (*right, *wrong), j)


def prefill(feeder: Feeder, index: int, length: int) -> None:
    """The prompt in pieces: a short one, one as long as a window, and what is left."""
    for size in (2, feeder.manager.num_pending_rows + 1):
        if feeder.num_fed(index) + size <= length:
            feeder.run([Piece(index, size)])
    if length > feeder.num_fed(index):
        feeder.run([Piece(index, length - feeder.num_fed(index))])


def error_of(feeder: Feeder, pieces: list[Piece], seeds: tuple[int, ...] = (3,)) -> float:
    """Runs a pass; the largest difference of a kept row's logits from plain decoding."""
    starts = [feeder.num_fed(piece.request) for piece in pieces]
    error = 0.0
    for piece, start, rows in zip(pieces, starts, feeder.run(pieces), strict=True):
        _, plain = plain_run(seeds[piece.request])
        for i in range(piece.num_certain + piece.num_accepted):
            difference = (rows[i] - plain[start + i]).abs().max().nan_to_num(nan=torch.inf)
            error = max(error, float(difference))
    return error


def error_of_rest(feeder: Feeder) -> float:
    """Goes on with a plain row, a window that keeps one draft, several tokens, another window."""
    k = feeder.manager.num_pending_rows
    error = error_of(feeder, [Piece(0, 1)])
    error = max(error, error_of(feeder, [window(feeder, 0, k, 1)]))
    error = max(error, error_of(feeder, [Piece(0, 5)]))
    return max(error, error_of(feeder, [window(feeder, 0, k, k)]))


def state_error(feeder: Feeder) -> dict[str, float]:
    """Differences of each kind of state from plain decoding."""
    return largest_difference(logical_state(feeder, 0), plain_run()[0][feeder.num_fed(0)])


def verified(k: int, j: int, length: int) -> Feeder:
    """A request after its prompt and one window."""
    feeder = Feeder(model(), [text()], num_pending_rows=k)
    prefill(feeder, 0, length)
    assert error_of(feeder, [window(feeder, 0, k, j)]) < EXACT
    assert feeder.num_fed(0) == length + 1 + j
    return feeder


def materialize(feeder: Feeder, index: int = 0) -> None:
    row = feeder.requests[index].row
    assert row is not None
    feeder.runner.materialize(row)
    assert feeder.manager.num_kept_rows(row) == 0


@pytest.mark.parametrize("length", [WITHIN_BUDGET, PAST_BUDGET])
@pytest.mark.parametrize(("k", "j"), WINDOWS)
def test_materialized_state_is_that_of_plain_decoding(k: int, j: int, length: int) -> None:
    feeder = verified(k, j, length)
    materialize(feeder)
    differences = state_error(feeder)
    assert len(differences) == 6 + (length == PAST_BUDGET or length + 1 + j > 11)
    assert max(differences.values()) < EXACT, differences
    # Nothing is left to fold: once more changes nothing.
    before = logical_state(feeder, 0)
    materialize(feeder)
    assert not any(largest_difference(logical_state(feeder, 0), before).values())
    assert error_of_rest(feeder) < EXACT


@pytest.mark.parametrize("length", [1, PAST_BUDGET])
@pytest.mark.parametrize(("k", "j"), WINDOWS)
def test_the_next_pass_folds_what_is_pending(k: int, j: int, length: int) -> None:
    assert error_of_rest(verified(k, j, length)) < EXACT


@pytest.mark.parametrize(("k", "j"), [(k, j) for k, j in WINDOWS if k in (1, 3, 8)])
def test_tables_lengths_and_context_after_a_window(k: int, j: int) -> None:
    """They are integers: equal, not near."""
    drafted, plain = (Feeder(model(), [text()], num_pending_rows=k) for _ in range(2))
    for feeder in (drafted, plain):
        prefill(feeder, 0, PAST_BUDGET)
    drafted.run([window(drafted, 0, k, j)])
    materialize(drafted)
    for _ in range(j + 1):
        plain.run([Piece(0, 1)])
    seen: list[Any] = []
    for feeder in (drafted, plain):
        batches: list[Any] = []
        hook = feeder.model.model.register_forward_pre_hook(
            lambda module, args, batches=batches: batches.append(args[0])
        )
        feeder.run([window(feeder, 0, k, 0)])
        hook.remove()
        seen.append(batches[0])
    assert drafted.num_fed(0) == plain.num_fed(0) == PAST_BUDGET + j + 2
    tables = [f.manager.block_tables for f in (drafted, plain)]
    assert all(tables[0][name].blocks(0) == tables[1][name].blocks(0) for name in tables[0])
    assert_equal(seen[0], seen[1], "batch")


def assert_equal(actual: Any, expected: Any, name: str) -> None:
    """What the layers are told is the same: positions, slots, counts, ids before the window."""
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected), name
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{name}.{key}")
    elif isinstance(expected, tuple):
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(a, b, f"{name}.{i}")
    elif hasattr(expected, "__dataclass_fields__"):
        for field in expected.__dataclass_fields__:
            assert_equal(getattr(actual, field), getattr(expected, field), f"{name}.{field}")
    else:
        assert actual == expected, name


@pytest.mark.parametrize("k", [1, 3, 8])
def test_two_windows_in_a_row(k: int) -> None:
    """The second folds what the first left, whatever each of them kept."""
    for j in range(k + 1):
        for next_j in {0, k - j}:
            feeder = verified(k, j, WITHIN_BUDGET)
            assert error_of(feeder, [window(feeder, 0, k, next_j)]) < EXACT, (j, next_j)
            materialize(feeder)
            assert max(state_error(feeder).values()) < EXACT, (j, next_j)


@pytest.mark.parametrize("k", range(1, 9))
def test_a_step_without_drafts_after_one_that_accepted(k: int) -> None:
    feeder = verified(k, k, PAST_BUDGET)
    assert error_of(feeder, [Piece(0, 1)]) < EXACT
    materialize(feeder)
    assert max(state_error(feeder).values()) < EXACT
    assert error_of(feeder, [window(feeder, 0, k, k)]) < EXACT


@pytest.mark.parametrize("k", range(1, 9))
def test_requests_that_keep_different_numbers(k: int) -> None:
    """One batch: windows that keep 0, some and all drafts, shorter ones, a plain row, a prompt."""
    seeds = tuple(range(10, 16))
    feeder = Feeder(model(), [text(seed) for seed in seeds], num_pending_rows=k)
    for index in range(5):
        prefill(feeder, index, 3 + 6 * index)
    for turn in range(4):
        members = range(5) if turn == 0 else range(6)
        shapes = [(k, 0), (k, k), (k, k // 2), (0, 0), (max(k - 1, 1), max(k - 2, 0))]
        pieces = [window(feeder, i, *shapes[(i + turn) % 5]) for i in members if i < 5]
        # The last request's prompt runs in the same passes, in pieces of all lengths.
        pieces += [Piece(5, 1 + 5 * turn)] if turn else []
        assert error_of(feeder, pieces, seeds) < EXACT
    for index in range(6):
        materialize(feeder, index)
        state = logical_state(feeder, index)
        expected = plain_run(seeds[index])[0][feeder.num_fed(index)]
        assert max(largest_difference(state, expected).values()) < EXACT


@dataclass
class Refused:
    """A request of which K drafts ran and j were kept.

    Attributes:
        feeder: where the law is put to the test.
        keeper: the same request in caches of its own, in which all K were kept.
        k: drafts.
        j: those that were kept.
        drafts: their ids.
    """

    feeder: Feeder
    keeper: Feeder
    k: int
    j: int
    drafts: tuple[int, ...]

    @classmethod
    def window(cls, k: int, j: int) -> "Refused":
        feeder, keeper = (Feeder(model(), [text()], num_pending_rows=k) for _ in range(2))
        for one in (feeder, keeper):
            prefill(one, 0, PAST_BUDGET)
        piece = window(feeder, 0, k, j)
        feeder.run([piece])
        keeper.run([replace(piece, num_accepted=k)])
        return cls(feeder, keeper, k, j, piece.drafts)

    def copy(self, group: str, name: str) -> None:
        """One tensor as it were, had the rows that were refused been kept."""
        materialize(self.feeder)
        materialize(self.keeper)
        tensors = [one.manager.groups[group].tensors[name] for one in (self.feeder, self.keeper)]
        tensors[0].copy_(tensors[1])


def stale_context(refused: Refused) -> None:
    """The n-grams of the next row are made of the ids that ran last."""
    runner, size = refused.feeder.runner, refused.feeder.model.config.ngram_size - 1
    original, ran = runner._context, [*text()[: PAST_BUDGET + 1], *refused.drafts]
    stale = [ran[-size:]]
    runner._context = lambda *args: stale.pop() if stale else original(*args)  # type: ignore[method-assign]


def stale_length(refused: Refused) -> None:
    """The next row comes after the refused ones instead of over them."""
    manager, shift = refused.feeder.manager, refused.k - refused.j
    original = manager.plan

    def plan(spans: list[RowSpan], *args: Any, **options: Any) -> Any:
        return original([replace(s, start=s.start + shift) for s in spans], *args, **options)

    manager.plan = plan  # type: ignore[method-assign]


def stale_raw_keys(refused: Refused) -> None:
    """The raw index keys of refused rows are never overwritten."""
    manager, first = refused.feeder.manager, refused.feeder.num_fed(0)
    original, refused_positions = manager.plan, range(first, first + refused.k - refused.j)

    def plan(*args: Any, **options: Any) -> Any:
        positions, slot_mapping, windows = original(*args, **options)
        is_refused = torch.isin(positions, torch.tensor(refused_positions))
        slot_mapping[TARGET_INDEX][is_refused] = NULL_BLOCK_ID
        return positions, slot_mapping, windows

    manager.plan = plan  # type: ignore[method-assign]


def stale_pooled_keys(refused: Refused) -> None:
    """Blocks that refused rows completed count as formed."""
    manager = refused.feeder.manager
    original = manager._paged_view

    def paged_view(name: str, rows: Any, slots: Any, starts: Any, ends: Any, **options: Any) -> Any:
        formed = manager._num_pooled.get(name, np.zeros(1, dtype=np.int64))
        before = formed.copy()
        view = original(name, rows, slots, ends, ends, **options)
        np.maximum(formed, before, out=formed)
        return view

    manager._paged_view = paged_view  # type: ignore[method-assign]


def stale_count(num_kept: int | None) -> Callable[[Refused], None]:
    """Another number of drafts reaches the next pass: all of them, or none."""

    def miscount(refused: Refused) -> None:
        manager, row = refused.feeder.manager, refused.feeder.requests[0].row
        manager._num_kept[row] = refused.k if num_kept is None else num_kept

    return miscount


STALE: dict[str, Callable[[Refused], None]] = {
    "delta-rule state": lambda refused: refused.copy(DELTA_NET, "recurrent"),
    "delta-net convolution": lambda refused: refused.copy(DELTA_NET, "conv"),
    "n-gram convolution": lambda refused: refused.copy(NGRAM, "conv"),
    "n-gram context": stale_context,
    "length": stale_length,
    "raw index keys": stale_raw_keys,
    "pooled index keys": stale_pooled_keys,
    "count: all": stale_count(None),
    "count: none": stale_count(0),
}
REFUSING = [(1, 0), (3, 1), (5, 3), (8, 2)]


def errors_after(refused: Refused) -> tuple[float, float]:
    """Goes on for three passes: the largest errors of logits and of states."""
    feeder, k = refused.feeder, refused.k
    logits = error_of(feeder, [Piece(0, 1)])
    logits = max(logits, error_of(feeder, [window(feeder, 0, k, 1)]))
    logits = max(logits, error_of(feeder, [Piece(0, 2)]))
    materialize(feeder)
    return logits, max(state_error(feeder).values())


@pytest.mark.parametrize(("k", "j"), REFUSING)
def test_nothing_stale_breaks_nothing(k: int, j: int) -> None:
    assert max(errors_after(Refused.window(k, j))) < EXACT


@pytest.mark.parametrize(
    ("kind", "k", "j"),
    # None is the right count where none was kept.
    [(kind, k, j) for kind in STALE for k, j in REFUSING if kind != "count: none" or j],
)
def test_one_stale_kind_breaks_the_law(kind: str, k: int, j: int) -> None:
    refused = Refused.window(k, j)
    STALE[kind](refused)
    assert min(errors_after(refused)) > VISIBLE
