"""What one pass of a model reads: rows, positions and where each kind of state lies.

The scheduler decides which rows run, the model runner writes these tensors, the layers read them.

Shape legend, used by every docstring of the package:
    B requests of a batch; T rows (tokens) of the flattened batch; K drafts; V vocabulary;
    C hidden size; S residual streams; W = S * C; H / Hk query / key-value heads; D head dim;
    b requests of one window; L rows of one window, padded; N positions visible in one window;
    P pending rows a recurrent state keeps (the largest K of the engine).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outrider.logprobs import TokenLogprobs
    from outrider.request import Request

PLACEHOLDER_TOKEN_ID = -1
"""Stands where no token is: a draft that was never drawn, an output past the end of a run."""

NULL_BLOCK_ID = 0
"""Block of every paged group that no request owns; writes that must go nowhere go there."""


@dataclass(frozen=True)
class RowSpan:
    """The rows one request runs in a pass.

    Attributes:
        row: the request's place in the cache tables.
        start: position of its first row.
        num_rows: rows, drafts included.
        num_drafts: how many of them, at the end, are drafts.
    """

    row: int
    start: int
    num_rows: int
    num_drafts: int

    @property
    def num_certain_rows(self) -> int:
        """Rows that are kept whatever the verification says."""
        return self.num_rows - self.num_drafts


@dataclass(frozen=True)
class SnapshotRow:
    """A block boundary that a pass comes to, at which the state of a request is to be kept.

    Attributes:
        index: the request's place in the batch.
        num_rows: rows of its span before the boundary, 1 to all of them.
        slot: where the snapshot goes.
    """

    index: int
    num_rows: int
    slot: int


@dataclass(frozen=True)
class DraftTokens:
    """What a proposer drafted for the requests of a batch.

    Attributes:
        token_ids: [B, K] int64, PLACEHOLDER_TOKEN_ID where nothing was drawn; stays on the device.
        probs: [B, K, V], the law each draft was drawn from, or None for one-hot drafts.
        num_drafts: places of each request's window. One that holds a placeholder runs, and ends
            what is verified.
        is_unsound: [B] bool, whether what the drafts of a request were drawn from was not finite;
            None where nobody asks. Stays on the device.
    """

    token_ids: Tensor
    probs: Tensor | None
    num_drafts: Sequence[int]
    is_unsound: Tensor | None = None

    def select(self, indices: Tensor, num_drafts: Sequence[int]) -> DraftTokens:
        """The rows `indices` [b], of each the first `num_drafts` drafts."""
        probs = None if self.probs is None else self.probs[indices]
        unsound = None if self.is_unsound is None else self.is_unsound[indices]
        return DraftTokens(self.token_ids[indices], probs, num_drafts, unsound)


@dataclass(frozen=True)
class ScheduledBatch:
    """Who runs in a step, how many rows, with which drafts. Written by the scheduler.

    Attributes:
        requests: B of them.
        spans: their rows, in the order of the flattened batch.
        is_sampling: whether the request's rows reach its last token, so that a token is drawn.
        drafts: aligned with `requests`, or None where nobody has any.
        snapshots: block boundaries at which states are kept; those past the accepted drafts are
            given up again.
    """

    requests: Sequence[Request]
    spans: Sequence[RowSpan]
    is_sampling: Sequence[bool]
    drafts: DraftTokens | None
    snapshots: Sequence[SnapshotRow] = ()


@dataclass(frozen=True)
class SampledTokens:
    """What verification decided. Written by the rejection sampler, on the host.

    Attributes:
        num_accepted_tokens: drafts kept of each request, 0 where nothing was sampled.
        output_token_ids: per request the accepted drafts, then the recovered or bonus token; empty
            where nothing was sampled.
        is_broken: the request's logits are not finite; it emits nothing and cannot go on.
        num_draft_tokens: drafts of each request that were tokens: those before the first
            placeholder of its window.
        num_fallbacks: rows of each request that were not finite, or held no residual mass, and
            were worked around.
        logprobs: of each request, one entry for each of its output tokens, or None where it asks
            for none.
        has_unsound_drafts: of each request, what `DraftTokens.is_unsound` says of the drafts that
            were judged; empty where that is not known.
    """

    num_accepted_tokens: Sequence[int]
    output_token_ids: Sequence[Sequence[int]]
    is_broken: Sequence[bool]
    num_draft_tokens: Sequence[int]
    num_fallbacks: Sequence[int]
    logprobs: Sequence[Sequence[TokenLogprobs] | None]
    has_unsound_drafts: Sequence[bool] = ()


@dataclass(frozen=True)
class IndexRebuild:
    """Which pooled index blocks of a window must be formed again from their raw keys.

    Attributes:
        blocks: [b, R] int64, block numbers within the sequence; surplus entries repeat block 0.
        raw_slots: [b, R, r] int64, slots of the raw keys of each block.
        pooled_slots: [b, R] int64, where the pooled key goes (the null block for surplus entries).
    """

    blocks: Tensor
    raw_slots: Tensor
    pooled_slots: Tensor


@dataclass(frozen=True)
class PagedView:
    """One cache group's metadata for one window: its own block table, already turned into slots.

    Attributes:
        slots: [b, N] int64, physical slot of every position 0..N-1 (null block past the end).
        pooled_slots: [b, N // r] int64, slots of pooled index blocks, or None where not needed.
        rebuild: pooled blocks to form before they are read, or None.
    """

    slots: Tensor
    pooled_slots: Tensor | None = None
    rebuild: IndexRebuild | None = None


@dataclass(frozen=True)
class WindowSnapshots:
    """Block boundaries before the last certain row of a window's requests.

    What a pass folds has passed them by at its end, so the layers keep the states on their way.

    Attributes:
        stops: place in the window and rows of the request before the boundary, each request's
            ascending.
        requests: [n] int64, the places.
        num_rows: [n] int64, the rows.
        slots: [n] int64, where the snapshots go.
    """

    stops: tuple[tuple[int, int], ...]
    requests: Tensor
    num_rows: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Window:
    """Requests of a batch that are mixed over the sequence together, padded to L rows each.

    A row is certain when it is known to be kept (prompt tokens, the last emitted token), and a
    draft otherwise; drafts are the last rows of a request. The recurrent states fold, in this
    pass, the kept rows of the last window and the certain rows of this one.

    Attributes:
        request_index: [b] int64, place of each request in the batch.
        row_index: [b, L] int64, row of the flattened batch; padding repeats the last row.
        flat_index: [n] int64, places of [b * L] that are rows, not padding.
        is_row: [b, L] bool, False on padding.
        num_certain_rows: [b] int64.
        num_kept_rows: [b] int64, pending rows of the last window that were accepted, 0..P.
        positions: [b, L] int64, place in the sequence; padding repeats the last row's.
        context_ids: [b, ngram_size - 1] int64, the token ids before the first row, end-of-text
            where there are none.
        state_slots: group name -> [b] int64, slot of the request's recurrent state.
        paged: group name -> PagedView.
        max_seq_len: N, the largest number of visible positions.
        is_contiguous: rows are 0..b*L-1 in order, so a view does what a gather would.
        has_pending: some request may have pending rows.
        has_drafts: some row is a draft.
        snapshots: where states are kept within the certain rows, or None.
    """

    request_index: Tensor
    row_index: Tensor
    flat_index: Tensor
    is_row: Tensor
    num_certain_rows: Tensor
    num_kept_rows: Tensor
    positions: Tensor
    context_ids: Tensor
    state_slots: dict[str, Tensor]
    paged: dict[str, PagedView]
    max_seq_len: int
    is_contiguous: bool
    has_pending: bool
    has_drafts: bool
    snapshots: WindowSnapshots | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(b, L)."""
        return self.row_index.shape[0], self.row_index.shape[1]

    def gather(self, rows: Tensor) -> Tensor:
        """[T, ...] to [b, L, ...]; padding repeats the last row of its request."""
        b, length = self.shape
        if self.is_contiguous:
            return rows.view(b, length, *rows.shape[1:])
        return rows[self.row_index]

    def scatter(self, padded: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
        """[b, L, ...] back to [T, ...], dropping padding.

        Args:
            padded: [b, L, ...].
            rows: [T, ...] that other windows have filled so far, or None for the first window.
            num_rows: T.
        """
        if self.is_contiguous and padded.shape[0] * padded.shape[1] == num_rows:
            return padded.reshape(num_rows, *padded.shape[2:])
        if rows is None:
            rows = padded.new_zeros(num_rows, *padded.shape[2:])
        rows[self.row_index.flatten()[self.flat_index]] = padded.flatten(0, 1)[self.flat_index]
        return rows


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one pass, flattened over requests.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64.
        slot_mapping: paged group name -> [T] int64, slot each row's keys are written to.
        windows: every row belongs to exactly one.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: dict[str, Tensor]
    windows: tuple[Window, ...]

    @property
    def num_rows(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    @cached_property
    def is_draft(self) -> Tensor | None:
        """[T] bool; None where every row is certain."""
        if not any(window.has_drafts for window in self.windows):
            return None
        rows = None
        for window in self.windows:
            is_draft = window.is_row.cumsum(-1) > window.num_certain_rows[:, None]
            rows = window.scatter(is_draft, rows, self.num_rows)
        return rows


@dataclass
class MarginProbe:
    """Collects, per row, how near a discrete choice was to falling the other way.

    Passed to a model only by the self-test: a differing token counts as a near-tie when one of
    these margins is below the tolerance of the arithmetic.

    Attributes:
        router: one [T] tensor per layer, gap between the last chosen and the first refused
            expert's probability.
        indexer: one [T] tensor per sparse layer, gap at the edge of the block selection
            (infinite where everything visible is selected).
    """

    router: list[Tensor] = field(default_factory=list)
    indexer: list[Tensor] = field(default_factory=list)
