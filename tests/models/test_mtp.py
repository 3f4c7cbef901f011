"""The MTP head over whole sequences, against one row at a time.

Row p of depth j takes the streams of row p - 1 of the depth before (of the trunk at depth 0), the
token at p + 1, and what a drafting engine would have in its cache: rows 0..p-j of depth 0, then
one row of each depth between, then itself.
"""

import pytest
import torch
from torch import Tensor

from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from tests.models.parity import CONFIGS, parity_model, random_ids
from tests.models.plain_head import PlainHead
from tests.tolerances import largest_gap

NAME = "three_streams_4grams_prime_base"
LENGTH = 14  # within every budget but that of the smallest, which is given a larger one
NUM_DEPTHS = 3
EXACT = 1e-10  # float64
WRONG = 1e-2


def dense_model(name: str, **overrides: int) -> Qwen4ExpForCausalLM:
    ratio = parity_model(name).config.indexer_compress_ratio
    budget = -(-LENGTH // ratio) * ratio
    return parity_model(name, torch.float64, indexer_budget=budget, **overrides)


@torch.no_grad()
def unrolled(
    model: Qwen4ExpForCausalLM, ids: Tensor, num_depths: int = NUM_DEPTHS
) -> tuple[Tensor, list[Tensor]]:
    """The trunk's streams [T, W] and those of each depth, for [T + 1] ids."""
    assert model.mtp is not None
    streams = model.model.forward_sequence(ids[None, :-1]).streams
    embedded = model.model.embed_tokens(ids[None, 1:])
    outputs = model.mtp.unroll(streams, embedded, num_depths)
    return streams[0], [output.streams[0] for output in outputs]


def drafted(head: PlainHead, trunk: Tensor, ids: Tensor, last_kept: int) -> list[Tensor]:
    """Streams of each depth of one round of drafts whose last kept row is `last_kept`.

    The tokens of the drafts are those of the sequence, as when it is drafted right.
    """
    for position in range(last_kept + 1):
        streams = head.run(trunk[position], int(ids[position + 1]), position)
    result = [streams]
    for depth in range(1, NUM_DEPTHS):
        position = last_kept + depth
        result.append(head.run(result[-1], int(ids[position + 1]), position))
    return result


def largest_errors(
    head: PlainHead, trunk: Tensor, depths: list[Tensor], ids: Tensor
) -> list[float]:
    """Per depth, over all rounds of drafts that fit."""
    errors = [0.0] * NUM_DEPTHS
    for last_kept in range(LENGTH - NUM_DEPTHS + 1):
        for depth, expected in enumerate(drafted(head, trunk, ids, last_kept)):
            error = largest_gap([(depths[depth][last_kept + depth], expected)])
            errors[depth] = max(errors[depth], error)
    return errors


@pytest.mark.parametrize("name", CONFIGS)
def test_every_depth_is_what_a_round_of_drafts_computes(name: str) -> None:
    model = dense_model(name)
    ids = random_ids(2, 40, 3)[1, : LENGTH + 1]
    trunk, depths = unrolled(model, ids)
    assert max(largest_errors(PlainHead(model), trunk, depths, ids)) < EXACT


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_come_from_the_heads_own_mixer(name: str) -> None:
    model = dense_model(name)
    ids = random_ids(2, 40, 3)[1, : LENGTH + 1]
    _, depths = unrolled(model, ids)
    head = PlainHead(model)
    with torch.no_grad():
        logits = model.mtp_logits(depths[0])
        of_the_trunk = model.logits(depths[0])
    expected = torch.stack([head.logits(streams) for streams in depths[0]])
    assert (logits - expected).abs().max() < EXACT
    assert (of_the_trunk - expected).abs().max() > WRONG


@pytest.mark.parametrize("name", CONFIGS)
def test_first_depth_past_the_budget(name: str) -> None:
    model = parity_model(name, torch.float64)
    ids = random_ids(2, 41, 3)[1]
    trunk, depths = unrolled(model, ids, num_depths=1)
    head = PlainHead(model)
    num_sparse = 0
    for position, streams in enumerate(trunk):
        expected = head.run(streams, int(ids[position + 1]), position)
        assert (depths[0][position] - expected).abs().max() < EXACT
        num_sparse += len(head.attended) < position + 1
    assert num_sparse > 15


def test_visible_keys_of_a_draft() -> None:
    """A head whose rounds keep one row too many at depth 0 is far from ours at depths 1 and 2."""
    model = dense_model(NAME)
    ids = random_ids(2, 40, 3)[1, : LENGTH + 1]
    trunk, depths = unrolled(model, ids)

    class LateHead(PlainHead):
        is_drafting = False

        def run(self, streams: Tensor, token_id: int, position: int, *args: object) -> Tensor:
            result = super().run(streams, token_id, position)
            if self.is_drafting:
                # The draft's row in the cache becomes the one that the trunk's streams give.
                super().run(trunk[position], token_id, position)
            return result

    head = LateHead(model)
    errors = []
    for last_kept in range(4, LENGTH - NUM_DEPTHS + 1):
        head.is_drafting = False
        drafted(head, trunk, ids, last_kept)
        streams = depths[0][last_kept]
        head.is_drafting = True
        round_errors = []
        for depth in range(1, NUM_DEPTHS):
            position = last_kept + depth
            streams = head.run(streams, int(ids[position + 1]), position)
            round_errors.append(float((streams - depths[depth][position]).abs().max()))
        errors.append(round_errors)
    # At depth 1 the row itself is the only draft that is seen; from depth 2 on the cache matters.
    assert max(first for first, _ in errors) < EXACT
    assert min(second for _, second in errors) > 1e-4


def test_hidden_norm_spans_all_streams() -> None:
    """A norm per stream, as in the gated residual, is far off where streams differ in size."""
    model = dense_model(NAME)
    ids = random_ids(2, 40, 3)[1, : LENGTH + 1]
    trunk, _ = unrolled(model, ids)
    sizes = torch.tensor([0.2, 1.0, 4.0], dtype=torch.float64).repeat_interleave(24)
    head, wrong = PlainHead(model), PlainHead(model)
    wrong.norm_groups = model.config.hc_count
    assert model.mtp is not None
    for position in (0, 5):
        streams, token_id = trunk[position] * sizes, int(ids[position + 1])
        with torch.no_grad():
            embedded = model.model.embed_tokens(torch.tensor(token_id))
            fused = model.mtp.fuse(streams, embedded)
        assert (fused - head._fuse(streams, token_id)).abs().max() < EXACT
        assert (fused - wrong._fuse(streams, token_id)).abs().max() > 0.5


def test_feedback_is_taken_before_the_mixer() -> None:
    """What the head's mixer makes of the streams is not what the next step is fed."""
    model = dense_model(NAME)
    ids = random_ids(2, 40, 3)[1, : LENGTH + 1]
    trunk, depths = unrolled(model, ids)
    head = PlainHead(model)
    last_kept = 6
    first = drafted(head, trunk, ids, last_kept)[0]
    mixed = head.mixed(first).repeat(model.config.hc_count)
    expected = depths[1][last_kept + 1]
    token_id = int(ids[last_kept + 2])
    assert (head.run(first, token_id, last_kept + 1) - expected).abs().max() < EXACT
    assert (head.run(mixed, token_id, last_kept + 1) - expected).abs().max() > WRONG


@pytest.mark.parametrize("num_layers", [1, 2])
def test_no_row_sees_what_comes_after_it(num_layers: int) -> None:
    model = dense_model(NAME, mtp_num_hidden_layers=num_layers)
    ids = random_ids(2, 40, 3)[1, : LENGTH + 1]
    _, expected = unrolled(model, ids)
    for last in range(LENGTH):
        changed = ids.clone()
        changed[last + 2 :] = (changed[last + 2 :] + 11) % 97
        _, depths = unrolled(model, changed)
        for depth in range(min(NUM_DEPTHS, last + 1)):
            rows = slice(depth, last + 1)
            assert (depths[depth][rows] - expected[depth][rows]).abs().max() < EXACT


def test_layers_take_turns() -> None:
    """Of two layers the second drafts at odd steps: `spec_step_idx % num_mtp_layers`."""
    model = dense_model(NAME, mtp_num_hidden_layers=2)
    assert model.mtp is not None
    layers = list(model.mtp.layers)
    assert len(layers) == 2
    assert [layers.index(model.mtp.layer(step)) for step in range(5)] == [0, 1, 0, 1, 0]


def test_two_layers_have_rows_of_their_own() -> None:
    """Each layer sees the rows that it ran itself: the first those of depths 0 and 2."""
    model = dense_model(NAME, mtp_num_hidden_layers=2)
    ids = random_ids(2, 40, 3)[1, : LENGTH + 1]
    trunk, depths = unrolled(model, ids)
    head, tokens = PlainHead(model), ids[1:].tolist()
    first = [head.run(trunk[p], tokens[p], p) for p in range(LENGTH)]
    second = [
        head.run(first[p - 1], tokens[p], p, layer=1, listed=list(range(1, p + 1)))
        for p in range(1, LENGTH)
    ]
    # From the end: running a row forgets those after it.
    third = [
        head.run(second[p - 2], tokens[p], p, listed=[*range(p - 1), p])
        for p in reversed(range(2, LENGTH))
    ][::-1]
    for depth, expected in enumerate((first, second, third)):
        assert (depths[depth][depth:] - torch.stack(expected)).abs().max() < EXACT
