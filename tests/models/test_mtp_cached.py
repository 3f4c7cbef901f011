"""The MTP head through its caches, round after round of drafts, against one row at a time.

A round runs the rows that verification kept, then feeds the head its own streams and its drafts.
The next round starts again at the first row that was not kept, over what the drafts have left.
"""

import random

import pytest
import torch
from torch import Tensor

from outrider.batch import ForwardBatch, RowSpan
from outrider.cache.cache_manager import CacheManager
from outrider.models.qwen4_exp.cache_specs import MTP_GROUPS, cache_specs, mtp_layer_states
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.models.qwen4_exp.sparse_attention import IndexShare
from tests.models.parity import CONFIGS, parity_model, random_ids
from tests.models.plain_head import PlainHead
from tests.tolerances import largest_gap

NUM_REQUESTS = 2
LENGTH = 45
NUM_DRAFTS = 4  # the deepest round has as many rows past the kept ones
EXACT = 1e-10
WRONG = 1e-3


class CachedHead:
    """The head in its cache groups, each with block tables in an order of its own."""

    def __init__(self, model: Qwen4ExpForCausalLM) -> None:
        assert model.mtp is not None
        self.model, self.mtp = model, model.mtp
        longest = LENGTH + NUM_DRAFTS
        block_size = 2 * model.config.indexer_compress_ratio
        self.manager = CacheManager(
            cache_specs(model.config, len(model.mtp.layers), NUM_DRAFTS),
            block_size=block_size,
            num_blocks=NUM_REQUESTS * -(-longest // block_size),
            max_num_seqs=NUM_REQUESTS,
            max_model_len=longest,
            num_pending_rows=NUM_DRAFTS,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        for table in self.manager.block_tables.values():
            random.Random(5).shuffle(table.pool._free)
        self.manager.block_tables["mtp_index"].pool._free.reverse()
        self.states = mtp_layer_states(len(model.mtp.layers), self.manager.groups)
        self.rows = [self.manager.allocate(longest) for _ in range(NUM_REQUESTS)]

    @torch.no_grad()
    def run(
        self,
        streams: Tensor,
        token_ids: list[int],
        spans: list[RowSpan],
        step: int,
        share: IndexShare | None,
    ) -> list[Tensor]:
        """Streams [rows, W] of each span."""
        is_followed = share is not None and share.positions is not None
        positions, slots, windows = self.manager.plan(
            spans, MTP_GROUPS, [()] * len(spans), reads_index=not is_followed
        )
        ids = torch.tensor(token_ids)
        batch = ForwardBatch(ids, positions, slots, windows)
        embedded = self.model.model.embed_tokens(ids)
        output = self.mtp(streams, embedded, batch, self.states, step, share)
        return list(output.split([span.num_rows for span in spans]))


class Rounds:
    """The same rounds in both heads."""

    def __init__(self, name: str, *, shares_index: bool) -> None:
        self.model = parity_model(name, torch.float64)
        self.ids = random_ids(NUM_REQUESTS, LENGTH + 1, 3)
        with torch.no_grad():
            self.trunk = self.model.model.forward_sequence(self.ids[:, :-1]).streams
        self.cached = CachedHead(self.model)
        self.plain = [PlainHead(self.model) for _ in range(NUM_REQUESTS)]
        self.shares_index = shares_index
        self.num_kept = [0] * NUM_REQUESTS
        self.num_sparse = 0
        self.last_streams: list[Tensor] = []

    def run(self, counts: list[int], drafts: list[list[int]]) -> float:
        """One round; the largest error of any row's streams.

        Args:
            counts: rows kept of each request since its last round.
            drafts: ids drafted for each request, as many for each.
        """
        starts = self.num_kept
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        share = IndexShare() if self.shares_index else None
        last, plain_last, error = self._keep(starts, ends, share)
        listed = [head.attended for head in self.plain]
        self.num_sparse += sum(len(one) < end for one, end in zip(listed, ends, strict=True))
        if share is not None:
            share.freeze()
        for step in range(1, len(drafts[0]) + 1):
            tokens = [one[step - 1] for one in drafts]
            places = [end - 1 + step for end in ends]
            spans = [RowSpan(row, p, 1, 0) for row, p in zip(self.cached.rows, places, strict=True)]
            outputs = self.cached.run(torch.stack(last), tokens, spans, step, share)
            last = [rows[0] for rows in outputs]
            plain_last = [
                head.run(streams, token, place, listed=[*one] if self.shares_index else None)
                for head, streams, token, place, one in zip(
                    self.plain, plain_last, tokens, places, listed, strict=True
                )
            ]
            error = max(error, largest_gap(zip(last, plain_last, strict=True)))
        self.num_kept, self.last_streams = ends, last
        return error

    def _keep(
        self, starts: list[int], ends: list[int], share: IndexShare | None
    ) -> tuple[list[Tensor], list[Tensor], float]:
        """Runs the kept rows; each request's last streams in both heads, and the largest error."""
        kept = [
            [(self.trunk[i, p], int(self.ids[i, p + 1]), p) for p in range(starts[i], ends[i])]
            for i in range(NUM_REQUESTS)
        ]
        spans = [
            RowSpan(row, start, len(rows), 0)
            for row, start, rows in zip(self.cached.rows, starts, kept, strict=True)
        ]
        streams = torch.stack([row[0] for rows in kept for row in rows])
        tokens = [row[1] for rows in kept for row in rows]
        outputs = self.cached.run(streams, tokens, spans, 0, share)
        expected = [
            [head.run(*row) for row in rows] for head, rows in zip(self.plain, kept, strict=True)
        ]
        stacked = [torch.stack(rows) for rows in expected]
        error = largest_gap(zip(outputs, stacked, strict=True))
        return [rows[-1] for rows in outputs], [rows[-1] for rows in expected], error

    def run_to_the_end(self, seed: int) -> float:
        rng, error = random.Random(seed), 0.0
        while all(kept < LENGTH - 8 for kept in self.num_kept):
            counts = [rng.choice([1, 1, 2, 3, NUM_DRAFTS, 7]) for _ in range(NUM_REQUESTS)]
            num_drafts = rng.randint(0, NUM_DRAFTS - 1)
            drafts = [[rng.randrange(97) for _ in range(num_drafts)] for _ in range(NUM_REQUESTS)]
            error = max(error, self.run(counts, drafts))
        return error


@pytest.mark.parametrize("shares_index", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_rounds_of_drafts(name: str, shares_index: bool) -> None:
    """Ragged rounds whose drafts are all wrong, from empty caches to past the budget."""
    rounds = Rounds(name, shares_index=shares_index)
    rounds.run([5, 2], [[], []])
    assert rounds.run_to_the_end(seed=1) < EXACT
    assert rounds.num_sparse > 5


@pytest.mark.parametrize("shares_index", [False, True])
def test_a_long_prompt_beside_a_step(shares_index: bool) -> None:
    """Two windows in one pass; what they select is put back into the order of the batch."""
    rounds = Rounds("three_streams_4grams_prime_base", shares_index=shares_index)
    rounds.run([2, 3], [[1, 2, 3], [4, 5, 6]])
    assert rounds.run([30, 2], [[7, 8, 9], [10, 11, 12]]) < EXACT
    assert rounds.run([1, 33], [[7, 8, 9], [10, 11, 12]]) < EXACT


@pytest.mark.parametrize("num_kept", [6, 30])
def test_sharing_makes_a_difference(num_kept: int) -> None:
    """The frozen list lacks the rows drafted since: also where a row of its own sees everything."""
    outcomes = []
    for shares_index in (False, True):
        rounds = Rounds("three_streams_4grams_prime_base", shares_index=shares_index)
        assert rounds.run([num_kept] * 2, [[1, 2], [3, 4]]) < EXACT
        outcomes.append(torch.stack(rounds.last_streams))
    assert (outcomes[0] - outcomes[1]).abs().amax(-1).min() > WRONG


def test_members_that_stop_drafting_leave_the_share() -> None:
    share = IndexShare()
    share.record(
        torch.tensor([2, 0]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[True, False]] * 2)
    )
    share.record(torch.tensor([1]), torch.tensor([[5, 6, 7]]), torch.tensor([[True, True, True]]))
    share.freeze()
    assert share.positions is not None
    assert share.is_listed is not None
    assert share.positions.tolist() == [[3, 0, 0], [5, 6, 7], [1, 0, 0]]
    assert share.is_listed.int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 0, 0]]
    share.select(torch.tensor([0, 2]))
    assert share.positions.tolist() == [[3, 0, 0], [1, 0, 0]]
    assert share.is_listed.int().tolist() == [[1, 0, 0], [1, 0, 0]]


def test_the_head_leaves_the_target_alone() -> None:
    rounds = Rounds("three_streams_4grams_prime_base", shares_index=False)
    rounds.run([9, 9], [[1, 2], [3, 4]])
    for name, group in rounds.cached.manager.groups.items():
        is_written = any(tensor.count_nonzero() for tensor in group.tensors.values())
        assert is_written == (name in MTP_GROUPS)
