"""Turns logits into the distribution that tokens are drawn from, for draft and target alike.

It is the only function that does so. What the acceptance rules need is that the draft's law is the
one the draft was really drawn from and the target's the one plain decoding would use; both hold
because both come from here, with the same parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.sampling.logits_processors import process_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.sampling.logits_processors import RowProcessors

ALL_RANKED = -1
"""Of `SamplingTensors.num_ranked`: the whole vocabulary must be put in order."""

_MIN_SORTED_SHARE = 1 / 8
"""Leading entries are found by topk up to this share of the vocabulary, by a full sort from there.

Measured on one thread of a Xeon, float32, `compute_probs` of one row of 4,096 / 248,320 entries, in
ms of processor time: temperature alone 0.03 / 0.5, min_p 0.06 / 1.0, top_k 20 with or without top_p
0.2 / 5, top_p alone (a full sort) 0.6 / 28.
"""


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of N rows, with what the host knows of them.

    The host's part says which passes over the vocabulary no row needs, without asking the device.
    It may be true of more rows than are there (after `rows`), never of fewer.

    Attributes:
        temperature: [N] float64; 0 takes the argmax.
        top_k: [N] int64; 0 is off.
        top_p: [N] float64 in (0, 1]; 1 is off.
        min_p: [N] float64 in [0, 1]; 0 is off.
        allowed_mask: [V] or [N, V] bool, False on ids that must not be drawn (padding rows of the
            vocabulary, what a grammar excludes), or None.
        all_greedy: every temperature is 0.
        any_greedy: some temperature is 0.
        any_min_p: some row that is not greedy uses min_p.
        num_ranked: how many leading entries of a row the filters must put in order: the largest
            top_k of a row that is not greedy, 0 if none has one, or ALL_RANKED if such a row uses
            top_p without top_k.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    allowed_mask: Tensor | None
    all_greedy: bool
    any_greedy: bool
    any_min_p: bool
    num_ranked: int

    @classmethod
    def from_values(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        *,
        device: torch.device | str = "cpu",
        allowed_mask: Tensor | None = None,
    ) -> SamplingTensors:
        """Builds the tensors of N rows from the requests' own numbers.

        Args:
            temperature: N values, 0 or more; less than 1.2e-38 counts as 0, more than 3.4e38 as
                that.
            top_k: N values; 0 and below are off.
            top_p: N values in (0, 1].
            min_p: N values in [0, 1].
            device: where the tensors go.
            allowed_mask: [V] or [N, V] bool on `device`, or None.
        """
        # Below the normal numbers of float32 a temperature is 0 in one dtype and not in another;
        # beyond them it is infinite in one, and what is masked would be NaN: -inf / inf.
        limits = torch.finfo(torch.float32)
        temperature = [min(t, limits.max) if t >= limits.tiny else 0.0 for t in temperature]
        sampled = [row for row, t in enumerate(temperature) if t > 0]
        is_open_nucleus = any(top_p[row] < 1 and top_k[row] <= 0 for row in sampled)
        max_top_k = max((top_k[row] for row in sampled), default=0)
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float64, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device).clamp_(min=0),
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float64, device=device),
            allowed_mask=allowed_mask,
            all_greedy=not sampled,
            any_greedy=len(sampled) < len(temperature),
            any_min_p=any(min_p[row] > 0 for row in sampled),
            num_ranked=ALL_RANKED if is_open_nucleus else max(max_top_k, 0),
        )

    def rows(self, index: Tensor) -> SamplingTensors:
        """The parameters of the rows `index` [M] int64 names; a row may repeat."""
        mask = self.allowed_mask
        return SamplingTensors(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            allowed_mask=mask[index] if mask is not None and mask.dim() == 2 else mask,
            all_greedy=self.all_greedy,
            any_greedy=self.any_greedy,
            any_min_p=self.any_min_p,
            num_ranked=self.num_ranked,
        )

    def without_argmax(self) -> SamplingTensors:
        """The same, but what takes the argmax has temperature 1 and no filter."""
        is_greedy = self.temperature == 0
        return replace(
            self,
            temperature=self.temperature.masked_fill(is_greedy, 1),
            top_k=self.top_k.masked_fill(is_greedy, 0),
            top_p=self.top_p.masked_fill(is_greedy, 1),
            min_p=self.min_p.masked_fill(is_greedy, 0),
            all_greedy=False,
            any_greedy=False,
        )


def compute_probs(
    logits: Tensor, params: SamplingTensors, processors: RowProcessors | None = None
) -> Tensor:
    """Returns the law each row's token is drawn from.

    In this order: what may not be drawn is masked, the processors (bad words, min_tokens,
    logit_bias, penalties), temperature, min_p, top_k, top_p; each filter sees what the one before
    left, renormalised. At the edge of top_k and top_p the lowest id wins among equals. What is
    masked or filtered has probability exactly 0. A row of temperature 0 is 1 at its argmax (the
    lowest id on ties) and 0 elsewhere: no filter takes the argmax away.

    A row has no law if a logit is NaN or +inf, or if all of them are -inf: it is returned full of
    NaN, which the acceptance rules take as the sign. Other rows do not feel it.

    Args:
        logits: [N, V] float. Not changed. Precisions below float32 are computed in float32.
        params: of the same N rows.
        processors: with the history of the same N rows, or None where none has any.

    Returns:
        [N, V], float64 for float64 logits and float32 otherwise.
    """
    scores = _processed(logits, params, processors)
    peak = scores.amax(-1, keepdim=True)
    if params.all_greedy:
        return _argmax_probs(scores, peak)
    probs = _filtered(scores, peak, params).softmax(-1)
    if not params.any_greedy:
        return probs
    is_greedy = (params.temperature == 0).unsqueeze(-1)
    return torch.where(is_greedy, _argmax_probs(scores, peak), probs)


def compute_logprobs(
    logits: Tensor, params: SamplingTensors, processors: RowProcessors | None = None
) -> Tensor:
    """Returns the logarithm of `compute_probs`, for reports.

    A row of temperature 0 has no law but a choice: of it, the logarithm of the softmax of what the
    argmax was taken of, without temperature and filters.

    Args:
        logits: as in `compute_probs`.
        params: as in `compute_probs`.
        processors: as in `compute_probs`.

    Returns:
        [N, V], float64 for float64 logits and float32 otherwise; -inf where the probability is 0.
    """
    scores = _processed(logits, params, processors)
    peak = scores.amax(-1, keepdim=True)
    return _filtered(scores, peak, params.without_argmax()).log_softmax(-1)


def _processed(logits: Tensor, params: SamplingTensors, processors: RowProcessors | None) -> Tensor:
    """[N, V] before the temperature. Not always a copy, so nothing may write into it."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return process_logits(scores, params.allowed_mask, processors)


def _filtered(scores: Tensor, peak: Tensor, params: SamplingTensors) -> Tensor:
    """[N, V]: scores over the temperature, -inf where a filter leaves them out, 0 at the peak."""
    temperature = params.temperature.to(scores.dtype).unsqueeze(-1)
    # The peak goes first: a tiny temperature then gives -inf beside an exact 0, and no overflow.
    scaled = (scores - peak).div_(temperature.masked_fill(temperature == 0, 1))
    if params.any_min_p:
        floor = params.min_p.log().to(scaled.dtype).unsqueeze(-1)
        scaled.masked_fill_(scaled < floor, -torch.inf)
    if params.num_ranked != 0:
        scaled.masked_fill_(_is_outranked(scaled, params), -torch.inf)
    return scaled


def _argmax_probs(scores: Tensor, peak: Tensor) -> Tensor:
    """[N, V]: 1 at the argmax of each row, or NaN throughout where its peak is not finite."""
    # 0 on rows that have a peak, NaN on the others, and so is what is written over it.
    probs = (peak - peak).expand_as(scores).clone()
    return probs.scatter_(-1, scores.argmax(-1, keepdim=True), 1 + (peak - peak))


def _is_outranked(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """[N, V] bool: entries that top_k or top_p leaves out.

    Both keep the first entries of the order (value, descending; id, ascending). Sorted values say
    how many, and thereby the value at the edge; ids matter only among those equal to it.
    """
    leading = _leading_values(scaled, params.num_ranked)
    num_kept = _num_kept(leading, params)
    edge = leading.gather(-1, num_kept - 1)
    num_tied_kept = num_kept - (leading > edge).sum(-1, keepdim=True)
    keeps_all = ((params.top_k == 0) & (params.top_p >= 1)).unsqueeze(-1)
    edge = edge.masked_fill_(keeps_all, -torch.inf)
    is_tied = scaled == edge
    is_late_tie = is_tied.cumsum(-1, dtype=torch.int32).gt(num_tied_kept).logical_and_(is_tied)
    return is_late_tie.logical_or_(scaled < edge)


def _num_kept(leading: Tensor, params: SamplingTensors) -> Tensor:
    """[N, 1] int64, at least 1: how many of the leading values the filters keep.

    Of what top_k leaves, an entry is in the nucleus if the share of those before it is short of
    top_p.

    Args:
        leading: [N, M], descending, 0 the largest; beyond it lies nothing that may be kept, except
            in rows that use neither filter.
        params: of the N rows.
    """
    top_k, top_p = params.top_k.unsqueeze(-1), params.top_p.unsqueeze(-1)
    is_in_top_k = (torch.arange(leading.shape[1], device=leading.device) < top_k) | (top_k == 0)
    # A running sum, and not softmax: what a row sums to must not depend on M, on other rows.
    mass = leading.double().exp().mul_(is_in_top_k).cumsum(-1)
    mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    is_in_nucleus = (mass_before < top_p * mass[:, -1:]) | (top_p >= 1)
    return (is_in_top_k & is_in_nucleus).sum(-1, keepdim=True).clamp_(min=1)


def _leading_values(scaled: Tensor, count: int) -> Tensor:
    """[N, M]: the `count` largest entries of each row, descending; all of them for ALL_RANKED."""
    vocab_size = scaled.shape[-1]
    if count == ALL_RANKED or count >= vocab_size * _MIN_SORTED_SHARE:
        leading = torch.sort(scaled, dim=-1, descending=True).values
        return leading if count == ALL_RANKED else leading[:, :count]
    return torch.topk(scaled, count, dim=-1).values
