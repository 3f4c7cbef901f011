"""Feeds sequences to a model in pieces of any shape, through its caches."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import DraftTokens, MarginProbe, RowSpan, ScheduledBatch
from outrider.cache.cache_manager import CacheManager
from outrider.engine.model_runner import ModelRunner
from outrider.models.qwen4_exp.cache_specs import cache_specs, target_layer_states
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.request import Request
from outrider.sampling_params import SamplingParams
from outrider.stop_checker import StopChecker
from tests.tolerances import largest_gap


@dataclass(frozen=True)
class Piece:
    """What one request runs in a pass.

    Attributes:
        request: index of the request.
        num_certain: tokens of its sequence.
        drafts: ids that run after them.
        num_accepted: how many of these are kept.
    """

    request: int
    num_certain: int
    drafts: tuple[int, ...] = ()
    num_accepted: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_certain + len(self.drafts)


class Feeder:
    """Requests in the caches of a target.

    Blocks and state slots are handed out in an order of its own in every group, so that a slot
    of one group read with the table of another is wrong.

    Args:
        model: the target.
        sequences: what each request is to become; accepted drafts are tokens of it.
        num_pending_rows: P, drafts of a window at the most.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        sequences: Sequence[Sequence[int]],
        num_pending_rows: int,
    ) -> None:
        self.model = model
        self.sequences = [list(one) for one in sequences]
        longest = max(map(len, self.sequences)) + num_pending_rows + 1
        block_size = model.config.indexer_compress_ratio * 2
        num_blocks = -(-longest // block_size) * len(self.sequences) + 3
        weight = model.lm_head.weight
        self.manager = CacheManager(
            cache_specs(model.config, len(model.mtp.layers) if model.mtp else 0, num_pending_rows),
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=len(self.sequences) + 1,
            max_model_len=longest,
            num_pending_rows=num_pending_rows,
            dtype=weight.dtype,
            device=weight.device,
        )
        shuffle = random.Random(5).shuffle
        for table in self.manager.block_tables.values():
            shuffle(table.pool._free)
        for pool in self.manager.state_pools.values():
            shuffle(pool._free)
        self.states = target_layer_states(model.config, self.manager.groups)
        self.runner = ModelRunner(model, self.manager, self.states, None)
        params = SamplingParams()
        self.requests = [
            Request(str(i), [], 1, params, 1, StopChecker(params, frozenset(), 1, None), seed=0)
            for i in range(len(self.sequences))
        ]
        for request in self.requests:
            request.row = self.manager.allocate(longest)

    def num_fed(self, index: int) -> int:
        """Tokens of a request that have run and are kept."""
        return self.requests[index].num_computed_tokens

    def left(self, index: int) -> list[int]:
        """Tokens of a request's sequence that have not run."""
        return self.sequences[index][self.num_fed(index) :]

    @torch.no_grad()
    def run(self, pieces: Sequence[Piece], probe: MarginProbe | None = None) -> list[Tensor]:
        """One pass; the logits of every row, [rows, V] a piece."""
        spans = []
        for piece in pieces:
            request = self.requests[piece.request]
            start = request.num_computed_tokens
            request.token_ids = self.sequences[piece.request][: start + piece.num_certain]
            assert request.row is not None
            spans.append(RowSpan(request.row, start, piece.num_rows, len(piece.drafts)))
        width = max(len(piece.drafts) for piece in pieces)
        padded = [[*piece.drafts, *[-1] * (width - len(piece.drafts))] for piece in pieces]
        counts = [len(piece.drafts) for piece in pieces]
        drafts = DraftTokens(torch.tensor(padded), None, counts) if width else None
        requests = [self.requests[piece.request] for piece in pieces]
        batch = ScheduledBatch(requests, spans, [True] * len(pieces), drafts)
        target = self.runner.verify(batch, probe)
        self._check_sampled_rows(pieces, target.logits, target.hidden_states)
        self.manager.commit(spans, [piece.num_accepted for piece in pieces])
        self.manager.check_integrity()
        for piece in pieces:
            request = self.requests[piece.request]
            request.num_computed_tokens += piece.num_certain + piece.num_accepted
        logits = self.model.logits(target.hidden_states)
        return list(logits.split([piece.num_rows for piece in pieces]))

    def _check_sampled_rows(
        self, pieces: Sequence[Piece], logits: Tensor, hidden_states: Tensor
    ) -> None:
        """The runner's logits are those of the last certain row and of the drafts."""
        rows, offset = [], 0
        for piece in pieces:
            rows += range(offset + piece.num_certain - 1, offset + piece.num_rows)
            offset += piece.num_rows
        assert hidden_states.shape[0] == offset
        expected = self.model.logits(hidden_states[rows])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5, equal_nan=True)


def random_pieces(feeder: Feeder, pending: int, rng: random.Random) -> list[Piece]:
    """A ragged batch: of some requests, in any order, pieces of prompts and windows of drafts."""
    members = [i for i in range(len(feeder.sequences)) if feeder.left(i)]
    rng.shuffle(members)
    pieces = []
    for index in members[: rng.randint(1, len(members))]:
        left = feeder.left(index)
        if rng.random() < 0.25:
            pieces.append(Piece(index, min(rng.choice([1, 2, 3, 5, 13, 17]), len(left))))
            continue
        num_drafts = rng.randint(0, pending)
        num_right = rng.randint(0, min(num_drafts, len(left) - 1))
        wrong = [rng.randrange(feeder.model.config.vocab_size) for _ in range(num_drafts)]
        drafts = [*left[1 : 1 + num_right], *wrong[num_right:]]
        # A draft that is right may be refused as well.
        num_accepted = rng.randint(0, num_right) if rng.random() < 0.3 else num_right
        pieces.append(Piece(index, 1, tuple(drafts), num_accepted))
    return pieces


def expected_logits(model: Qwen4ExpForCausalLM, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """[T, V] of each whole sequence, without any cache; padding comes after and acts on nothing."""
    longest = max(map(len, sequences))
    padded = torch.tensor([[*one, *[0] * (longest - len(one))] for one in sequences])
    with torch.no_grad():
        logits = model.logits(model.model.forward_sequence(padded).streams)
    return [rows[: len(one)] for rows, one in zip(logits, sequences, strict=True)]


def largest_error(feeder: Feeder, pieces: Sequence[Piece]) -> float:
    """Runs a pass; the largest error of any row's logits, those of wrong drafts included."""
    starts = [feeder.num_fed(piece.request) for piece in pieces]
    sequences = [
        [*feeder.sequences[piece.request][: start + piece.num_certain], *piece.drafts]
        for piece, start in zip(pieces, starts, strict=True)
    ]
    wholes = expected_logits(feeder.model, sequences)
    expected = [rows[start:] for rows, start in zip(wholes, starts, strict=True)]
    return largest_gap(zip(feeder.run(pieces), expected, strict=True))


def feed_randomly(
    feeder: Feeder, pending: int, seed: int, between: Callable[[Feeder], None] | None = None
) -> float:
    """Feeds all sequences to their ends; the largest error of any logit.

    Args:
        feeder: with sequences that have not run to their ends.
        pending: drafts of a window at the most.
        seed: of the shapes.
        between: called after each pass.
    """
    rng, error = random.Random(seed), 0.0
    while any(feeder.left(i) for i in range(len(feeder.sequences))):
        error = max(error, largest_error(feeder, random_pieces(feeder, pending, rng)))
        if between is not None:
            between(feeder)
    return error
