"""What the comparison of cached and whole sequences would miss: nothing that is broken here.

Each test breaks one part of the bookkeeping and finds the logits far off.
"""

from collections.abc import Callable

import pytest
import torch

from tests.models.feeder import Feeder, Piece, feed_randomly, largest_error
from tests.models.parity import parity_model, random_ids

NAME = "three_streams_4grams_prime_base"
LENGTH = 45
EXACT = 1e-10
WRONG = 1e-3


def sequences(num_requests: int) -> list[list[int]]:
    return random_ids(num_requests, LENGTH, 3).tolist()


def accept_one_more(feeder: Feeder) -> None:
    kept = feeder.manager._num_kept
    kept[kept > 0] += 1
    kept.clip(max=4, out=kept)


def accept_none(feeder: Feeder) -> None:
    feeder.manager._num_kept[:] = 0


@pytest.mark.parametrize("mistake", [accept_one_more, accept_none])
def test_a_wrong_count_of_kept_rows_is_seen(mistake: Callable[[Feeder], None]) -> None:
    model = parity_model(NAME, torch.float64)
    assert feed_randomly(Feeder(model, sequences(3), 4), 4, 2, between=mistake) > WRONG


@pytest.mark.parametrize("group", ["delta_net", "ngram"])
def test_a_recurrent_state_left_behind_is_seen(group: str) -> None:
    model = parity_model(NAME, torch.float64)
    feeder = Feeder(model, [sequences(1)[0]], 4)
    feeder.run([Piece(0, 20)])
    before = {name: t.clone() for name, t in feeder.manager.groups[group].tensors.items()}
    drafts = tuple(feeder.left(0)[1:3])
    assert largest_error(feeder, [Piece(0, 1, drafts, 2)]) < EXACT
    for name, tensor in feeder.manager.groups[group].tensors.items():
        tensor.copy_(before[name])
    assert largest_error(feeder, [Piece(0, 1)]) > WRONG


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_pooled_block_of_rejected_rows_is_seen(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that a window completed with drafts are formed anew once these are refused."""
    model = parity_model("silu_gate_unnormalised_experts_full_rotation", torch.float64)
    feeder = Feeder(model, sequences(1), 8)
    feeder.run([Piece(0, 20)])
    original = feeder.manager._paged_view

    def late_view(
        name: str, rows: object, slots: object, starts: int, *args: object, **options: bool
    ) -> object:
        return original(name, rows, slots, starts + 8, *args, **options)  # type: ignore[arg-type]

    if is_broken:
        monkeypatch.setattr(feeder.manager, "_paged_view", late_view)
    error = 0.0
    for _ in range(8):
        wrong = tuple((token + 5) % 97 for token in feeder.left(0)[1:9])
        error = max(error, largest_error(feeder, [Piece(0, 1, wrong, 0)]))
    assert error > WRONG if is_broken else error < EXACT


def test_the_slots_of_another_group_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parity_model(NAME, torch.float64)
    feeder = Feeder(model, sequences(2), 2)
    original = feeder.manager.plan

    def swapped(*args: object, **options: object) -> object:
        positions, slots, windows = original(*args, **options)  # type: ignore[arg-type]
        return positions, {**slots, "target_index": slots["target_attention"]}, windows

    monkeypatch.setattr(feeder.manager, "plan", swapped)
    assert feed_randomly(feeder, 2, seed=3) > WRONG
