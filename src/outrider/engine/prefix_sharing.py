"""What the scheduler asks of the prefix cache: where a request may begin, and what it leaves.

A request leaves every block that it fills and, at chosen block boundaries, a snapshot of its
recurrent states. With room enough that is every boundary. Where snapshots are few, it is

- the last boundaries of what was known when the rows ran, where a repeated prompt and the next
  turn of a chat begin,
- the place where an earlier sequence went another way, as after a common system prompt,
- and every so many blocks, so that no prompt takes more than a quarter of the room.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.batch import ScheduledBatch, SnapshotRow
from outrider.cache.block_hashes import extend_block_hashes
from outrider.cache.prefix_cache import NO_HIT, PrefixHit
from outrider.spec_decode.draft_length import head_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.batch import RowSpan, SampledTokens
    from outrider.cache.cache_manager import CacheManager
    from outrider.cache.prefix_cache import PrefixCache
    from outrider.request import Request

_SHARE_OF_ONE = 4  # of the snapshots a prompt takes this part at most, a few more aside


class PrefixSharing:
    """The prefix cache in terms of requests.

    Args:
        cache_manager: with a prefix cache.
        num_speculative_tokens: K.
        drafter_max_model_len: positions from here on the head does not run; None is no limit.

    Attributes:
        num_queried_tokens: of requests when they were let in for the first time, but for those
            that ask for log probabilities of their prompt and so run all of it.
        num_hit_tokens: those of them that did not have to run.
    """

    def __init__(
        self,
        cache_manager: CacheManager,
        num_speculative_tokens: int,
        drafter_max_model_len: int | None,
    ) -> None:
        assert cache_manager.prefix is not None, "these caches keep nothing to share"
        self._prefix: PrefixCache = cache_manager.prefix
        self._block_size = cache_manager.block_size
        self._num_speculative_tokens = num_speculative_tokens
        self._drafter_max_model_len = drafter_max_model_len
        self._batch: ScheduledBatch | None = None
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def find(self, request: Request) -> PrefixHit:
        """What a request that waits could begin with.

        One that asks for the logprobs of its prompt runs all of it.
        """
        if request.prompt_logprobs is not None:
            return NO_HIT
        return self._prefix.match(
            request.token_ids, self._hashes(request), with_head=self._drafts(request)
        )

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Takes up that a request was let in with a hit."""
        request.num_computed_tokens = hit.num_tokens
        request.num_known_tokens = hit.num_known_tokens
        # The head's last block is its own copy, and becomes another's when its last row is made.
        request.num_left_blocks = max(hit.num_tokens // self._block_size - 1, 0)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            if request.prompt_logprobs is None:
                self.num_queried_tokens += request.num_prompt_tokens
                self.num_hit_tokens += hit.num_tokens

    def start(self, batch: ScheduledBatch) -> ScheduledBatch:
        """A step begins: reserves a snapshot for each boundary of its rows that is worth one.

        Returns:
            The batch with them.
        """
        rows = []
        for index, (request, span) in enumerate(zip(batch.requests, batch.spans, strict=True)):
            for boundary in self._boundaries(request, span):
                slot = self._prefix.snapshots.reserve()
                if slot is not None:
                    rows.append(SnapshotRow(index, boundary - span.start, slot))
        self._batch = replace(batch, snapshots=rows)
        return self._batch

    def _boundaries(self, request: Request, span: RowSpan) -> list[int]:
        """Block boundaries that are worth a snapshot, ascending."""
        size, num_tokens, hashes = self._block_size, len(request.token_ids), self._hashes(request)
        stride = size * self._stride(num_tokens)
        wanted = []
        first = span.start // size * size + size
        for boundary in range(first, span.start + span.num_rows + 1, size):
            number = boundary // size - 1
            if number < len(hashes) and hashes[number] in self._prefix.snapshots:
                self._prefix.snapshots.touch(hashes[number])
            elif (
                boundary >= num_tokens - size
                or boundary == request.num_known_tokens
                or boundary % stride == 0
            ):
                wanted.append(boundary)
        return wanted

    def _stride(self, num_tokens: int) -> int:
        """Blocks between two snapshots of one sequence: a power of two, so that strides nest."""
        room = max(self._prefix.snapshots.num_slots // _SHARE_OF_ONE, 1)
        stride = 1
        while num_tokens // self._block_size > stride * room:
            stride *= 2
        return stride

    def finish(self, result: SampledTokens, is_left: Sequence[bool]) -> None:
        """Leaves to others what the requests of the batch have run, before they give it back.

        Args:
            result: of the batch, whose tokens the requests have taken up.
            is_left: whether a request had not been aborted.
        """
        batch = self._batch
        assert batch is not None, "no step has begun"
        is_sound = [
            left and not broken for left, broken in zip(is_left, result.is_broken, strict=True)
        ]
        for request, is_broken in zip(batch.requests, result.is_broken, strict=True):
            if is_broken:
                self._prefix.forget(_row(request), self._hashes(request))
        self._publish_snapshots(batch, result, is_sound)
        for i, request in enumerate(batch.requests):
            if is_sound[i]:
                unsound = result.has_unsound_drafts and result.has_unsound_drafts[i]
                self._leave_blocks(request, has_sound_head=not unsound)
        self._batch = None

    def cancel(self) -> None:
        """The step failed: what was reserved for it is free again."""
        if self._batch is not None:
            for one in self._batch.snapshots:
                self._prefix.snapshots.release(one.slot)
            self._batch = None

    def _publish_snapshots(
        self, batch: ScheduledBatch, result: SampledTokens, is_sound: Sequence[bool]
    ) -> None:
        """Completes the snapshots of a step, and gives up those at boundaries not come to."""
        late: list[tuple[int, int, int]] = []
        published = []
        for one in batch.snapshots:
            request, span = batch.requests[one.index], batch.spans[one.index]
            num_pending = one.num_rows - span.num_certain_rows
            boundary = span.start + one.num_rows
            has_come = num_pending <= result.num_accepted_tokens[one.index]
            if not (is_sound[one.index] and has_come and boundary <= len(request.token_ids)):
                self._prefix.snapshots.release(one.slot)
                continue
            if num_pending >= 0:
                late.append((span.row, one.slot, num_pending))
            published.append((request, boundary, one.slot))
        if late:
            rows, slots, counts = zip(*late, strict=True)
            self._prefix.save(rows, slots, counts)
        for request, boundary, slot in published:
            self._publish(request, boundary, slot)

    def _publish(self, request: Request, boundary: int, slot: int) -> None:
        """Lets a snapshot be found; one of the output takes the place of the one before it."""
        content = self._hashes(request)[boundary // self._block_size - 1]
        self._prefix.snapshots.publish(slot, content)
        if boundary <= request.num_prompt_tokens:
            return
        number, last = boundary // self._block_size, request.last_snapshot
        if last is not None and last < number and last % self._stride(len(request.token_ids)):
            self._prefix.snapshots.drop(self._hashes(request)[last - 1])
        request.last_snapshot = number

    def _leave_blocks(self, request: Request, *, has_sound_head: bool) -> None:
        """Lets the blocks be found that a request has filled since the last step."""
        row, token_ids = _row(request), request.token_ids
        if not has_sound_head:
            request.has_sound_head = False
            self._prefix.forget(row, (), with_target=False)
        hashes, size = self._hashes(request), self._block_size
        num_filled = min(request.num_computed_tokens, len(token_ids)) // size
        for number in range(request.num_left_blocks, num_filled):
            end = (number + 1) * size
            self._prefix.remember(
                row,
                number,
                hashes[number],
                next_id=token_ids[end] if end < len(token_ids) else None,
                with_head=request.has_sound_head and self._drafts(request),
            )
        request.num_left_blocks = max(num_filled, request.num_left_blocks)

    def _drafts(self, request: Request) -> bool:
        """Whether the head runs a request's rows: the last ones, and those that come."""
        return head_runs(request, 0, self._num_speculative_tokens, self._drafter_max_model_len)

    def _hashes(self, request: Request) -> list[bytes]:
        extend_block_hashes(
            request.block_hashes, request.token_ids, self._block_size, request.cache_salt
        )
        return request.block_hashes


def _row(request: Request) -> int:
    assert request.row is not None, "a running request has a row"
    return request.row
