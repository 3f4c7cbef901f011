"""The target through its caches, in pieces of any shape, against whole sequences.

In float64 against our own forward of whole sequences, to 1e-10; in float32 against transformers.
"""

import random

import pytest
import torch
from torch import Tensor

from outrider.batch import MarginProbe
from tests.models.feeder import (
    Feeder,
    Piece,
    expected_logits,
    feed_randomly,
    largest_error,
    random_pieces,
)
from tests.models.parity import (
    CONFIGS,
    MIN_MARGIN,
    TOLERANCE,
    is_clear,
    parity_model,
    random_ids,
    recorded_margins,
    reference_model,
)

LENGTH = 50  # past every budget
EXACT = 1e-10
NAMES = list(CONFIGS)
FIRST = NAMES[0]


def sequences(num_requests: int) -> list[list[int]]:
    """Of different length, the longest first."""
    ids = random_ids(num_requests, LENGTH, 3).tolist()
    return [one[: LENGTH - 4 * i] for i, one in enumerate(ids)]


@pytest.mark.parametrize(
    ("name", "pending"),
    [*((FIRST, pending) for pending in (0, 1, 3)), *((name, 8) for name in NAMES)],
)
def test_ragged_batches_of_pieces_and_windows(name: str, pending: int) -> None:
    """Three requests; windows of up to nine rows, drafts right and wrong, kept and refused."""
    model = parity_model(name, torch.float64)
    assert feed_randomly(Feeder(model, sequences(3), pending), pending, seed=pending) < EXACT


@pytest.mark.parametrize(("name", "pending"), [(FIRST, 0), (NAMES[1], 2), (NAMES[3], 1)])
def test_token_by_token(name: str, pending: int) -> None:
    model = parity_model(name, torch.float64)
    (ids,) = sequences(1)
    feeder = Feeder(model, [ids], pending)
    logits = torch.cat([feeder.run([Piece(0, 1)])[0] for _ in ids])
    assert (logits - expected_logits(model, [ids])[0]).abs().max() < EXACT


@pytest.mark.parametrize(
    "sizes", [[LENGTH], [1, 2, 3, 4, 40], [7] * 7 + [1], [19, 1, 30], [33, 17]]
)
@pytest.mark.parametrize("name", NAMES)
def test_odd_pieces(name: str, sizes: list[int]) -> None:
    model = parity_model(name, torch.float64)
    (ids,) = sequences(1)
    feeder = Feeder(model, [ids], num_pending_rows=3)
    logits = torch.cat([feeder.run([Piece(0, size)])[0] for size in sizes])
    assert (logits - expected_logits(model, [ids])[0]).abs().max() < EXACT


def test_a_piece_longer_than_a_chunk_of_the_delta_rule() -> None:
    model = parity_model(FIRST, torch.float64)
    ids = (sequences(1)[0] * 4)[:190]
    feeder = Feeder(model, [ids], num_pending_rows=3)
    pieces = [
        Piece(0, 1, (1, 2, 3), 0),
        Piece(0, 2, tuple(ids[3:4]), 1),
        Piece(0, 150),
        Piece(0, 36),
    ]
    logits = [feeder.run([piece])[0] for piece in pieces]
    kept = torch.cat(
        [rows[: p.num_certain + p.num_accepted] for rows, p in zip(logits, pieces, strict=True)]
    )
    assert (kept - expected_logits(model, [ids])[0]).abs().max() < EXACT


@pytest.mark.parametrize("start", [3, 25])
@pytest.mark.parametrize("name", [FIRST, NAMES[1]])
def test_every_number_of_drafts_kept(name: str, start: int) -> None:
    """Nine requests, each keeping another number of its eight drafts, on both sides of the budget.

    Twice, so that a window is read over what the one before has left, then a plain step.
    """
    model = parity_model(name, torch.float64)
    feeder = Feeder(model, sequences(1) * 9, num_pending_rows=8)
    feeder.run([Piece(i, start) for i in range(9)])
    for _ in range(2):
        pieces = []
        for num_accepted in range(9):
            left = feeder.left(num_accepted)
            drafts = [*left[1 : 1 + num_accepted], *[left[0]] * (8 - num_accepted)]
            pieces.append(Piece(num_accepted, 1, tuple(drafts), num_accepted))
        assert largest_error(feeder, pieces) < EXACT
    assert largest_error(feeder, [Piece(i, 1) for i in range(9)]) < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(name: str) -> None:
    """In float32: token by token, in pieces, and in windows with rejections."""
    model = parity_model(name)
    ids = random_ids(3, LENGTH, 3)
    with torch.no_grad(), recorded_margins((3, LENGTH)) as margins:
        model.model.forward_sequence(ids)
        reference = reference_model(model)(ids, use_cache=False).logits
    is_compared = is_clear(margins)
    assert is_compared.float().mean() > 0.9
    feeder, rng = Feeder(model, ids.tolist(), 5), random.Random(1)
    num_rows = 0
    while any(feeder.left(i) for i in range(3)):
        pieces = random_pieces(feeder, 5, rng)
        starts = [feeder.num_fed(piece.request) for piece in pieces]
        for piece, start, logits in zip(pieces, starts, feeder.run(pieces), strict=True):
            rows = slice(start, feeder.num_fed(piece.request))
            kept = logits[: rows.stop - start]
            error = (kept - reference[piece.request, rows]).abs().amax(-1)
            assert (error[is_compared[piece.request, rows]] < TOLERANCE).all()
            num_rows += len(kept)
    assert num_rows == 3 * LENGTH


def poison_what_was_rejected(feeder: Feeder) -> None:
    """NaN wherever a row lies that was not kept, or will be written before it is read."""
    groups, config = feeder.manager.groups, feeder.model.config
    ratio = config.indexer_compress_ratio
    for request in feeder.requests:
        assert request.row is not None
        kept, length = feeder.manager.num_kept_rows(request.row), request.num_computed_tokens
        rows = torch.tensor([request.row]).numpy()
        for name, pool in feeder.manager.state_pools.items():
            slot = int(pool.slots(rows)[0])
            for tensor_name, tensor in groups[name].tensors.items():
                history = {
                    ("delta_net", "conv"): config.linear_conv_kernel_dim - 1,
                    ("ngram", "conv"): (config.ple_conv_kernel_size - 1) * config.ngram_size,
                }.get((name, tensor_name), 0)
                if tensor_name != "recurrent":
                    tensor[:, slot, history + kept :] = torch.nan
        table = feeder.manager.block_tables["target_index"]
        slots = torch.from_numpy(
            table.slots(rows, len(table.blocks(request.row)) * table.block_size)
        )
        index = groups["target_index"].tensors
        index["raw_index_keys"][:, slots[0, length:]] = torch.nan
        first = length // ratio
        index["pooled_index_keys"][:, slots[0, first * ratio :: ratio] // ratio] = torch.nan


@pytest.mark.parametrize("name", NAMES[:2])
def test_rejected_rows_are_never_read(name: str) -> None:
    model = parity_model(name, torch.float64)
    feeder = Feeder(model, sequences(3), 4)
    assert feed_randomly(feeder, 4, seed=2, between=poison_what_was_rejected) < EXACT


def test_groups_have_tables_of_their_own() -> None:
    feeder = Feeder(parity_model(FIRST, torch.float64), sequences(2), 2)
    tables = feeder.manager.block_tables
    assert set(tables) == {"target_attention", "target_index", "mtp_attention", "mtp_index"}
    for row in (0, 1):
        assert len({tuple(table.blocks(row)) for table in tables.values()}) == 4


@pytest.mark.parametrize("name", NAMES)
def test_margins_are_those_of_the_sequence(name: str) -> None:
    model = parity_model(name, torch.float64)
    (ids,) = sequences(1)
    with torch.no_grad(), recorded_margins((1, LENGTH)) as expected:
        model.model.forward_sequence(torch.tensor([ids]))
    feeder = Feeder(model, [ids], 2)
    parts: list[list[Tensor]] = []
    for size in (3, 20, 1, 26):
        probe = MarginProbe()
        feeder.run([Piece(0, size)], probe)
        num_sparse = len(model.config.indexed_layer_indices)
        assert len(probe.router) == 4
        assert len(probe.indexer) == num_sparse
        parts.append([*probe.router, *probe.indexer])
    margins = torch.stack([torch.cat(layer) for layer in zip(*parts, strict=True)])
    smallest = torch.stack(expected).amin(0)[0]
    torch.testing.assert_close(margins.amin(0), smallest, rtol=0, atol=EXACT)
    assert (smallest > MIN_MARGIN).all()


def test_rows_of_long_sequences_choose_the_listed_form() -> None:
    """A budget far below the length: the gathered form of attention runs, and agrees."""
    model = parity_model("tied_no_ngrams", torch.float64)
    ids = (sequences(1)[0] * 4)[:150]
    feeder = Feeder(model, [ids], 2)
    feeder.run([Piece(0, 120)])
    for _ in range(6):
        drafts = (feeder.left(0)[1], 7)
        assert largest_error(feeder, [Piece(0, 1, drafts, 1)]) < EXACT


def test_a_request_that_comes_after_another_finds_nothing_of_it() -> None:
    model = parity_model(FIRST, torch.float64)
    feeder = Feeder(model, sequences(2), 3)
    feed_randomly(feeder, 3, seed=1)
    first = feeder.requests[0]
    assert first.row is not None
    feeder.manager.free(first.row)
    feeder.sequences[0] = feeder.sequences[1][::-1]
    first.row, first.num_computed_tokens = feeder.manager.allocate(LENGTH), 0
    assert feed_randomly(feeder, 3, seed=2) < EXACT


@pytest.mark.parametrize("start", [5, 30])
def test_a_broken_request_breaks_no_other(start: int) -> None:
    """A draft whose numbers are not finite, beside a request and before the next one."""
    model = parity_model(FIRST, torch.float64)
    feeder = Feeder(model, sequences(2), 3)
    feeder.run([Piece(0, start), Piece(1, start)])
    broken = next(i for i in range(97) if all(i not in one for one in feeder.sequences))
    embeddings = model.model.embed_tokens.weight.detach()
    finite = embeddings[broken].clone()
    embeddings[broken] = torch.nan
    right = tuple(feeder.left(1)[1:2])
    logits = feeder.run([Piece(0, 1, (broken, 1), 0), Piece(1, 1, right, 1)])
    embeddings[broken] = finite
    assert logits[0].isnan().any()
    expected = expected_logits(model, [feeder.sequences[1]])[0]
    assert (logits[1] - expected[start : start + 2]).abs().max() < EXACT
    first = feeder.requests[0]
    assert first.row is not None
    feeder.manager.free(first.row)
    first.row, first.num_computed_tokens = feeder.manager.allocate(LENGTH), 0
    # The longer request beside it makes a window that spans the places of what was broken.
    assert largest_error(feeder, [Piece(0, 3), Piece(1, 2)]) < EXACT
    assert feed_randomly(feeder, 3, seed=1) < EXACT
