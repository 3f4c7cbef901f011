"""The acceptance rules for one request, in plain Python, word for word from their definitions.

The reference that verify_rules.py is tested against; the engine does not import it. A row is a
list of V floats, a draft of PLACEHOLDER_TOKEN_ID was never drawn. Each function returns the number
of accepted drafts and the tokens emitted (none if the first target row is not finite).
"""

from __future__ import annotations

import math

from outrider.batch import PLACEHOLDER_TOKEN_ID

Row = list[float]


def standard_verify_naive(
    drafts: list[int],
    draft_rows: list[Row] | None,
    target_rows: list[Row],
    accept_uniforms: list[float],
    resample_uniforms: list[float],
) -> tuple[int, list[int]]:
    """arXiv:2211.17192, Algorithm 1; arguments as in `standard_verify`, of one request."""
    draft_rows = draft_rows or _one_hot_rows(drafts, len(target_rows[0]))
    end = _end_of_window(drafts, draft_rows, target_rows)
    for i in range(end):
        ratio = target_rows[i][drafts[i]] / draft_rows[i][drafts[i]]
        if accept_uniforms[i] > ratio:
            weights = _residual(1.0, target_rows[i], draft_rows[i])
            return i, [*drafts[:i], _draw(weights, resample_uniforms[i])]
    return _finish(drafts[:end], target_rows[end], resample_uniforms[end])


def block_verify_naive(
    drafts: list[int],
    draft_rows: list[Row] | None,
    target_rows: list[Row],
    accept_uniforms: list[float],
    resample_uniforms: list[float],
) -> tuple[int, list[int]]:
    """arXiv:2403.10444, Algorithm 2; arguments as in `block_verify`, of one request."""
    if draft_rows is None:
        return standard_verify_naive(drafts, None, target_rows, accept_uniforms, resample_uniforms)
    end = _end_of_window(drafts, draft_rows, target_rows)
    prefix_ratio, num_kept, kept_ratio = 1.0, 0, 1.0
    for i in range(end):
        ratio = target_rows[i][drafts[i]] / draft_rows[i][drafts[i]]
        prefix_ratio = min(1.0, prefix_ratio * ratio)
        threshold = prefix_ratio
        if i + 1 < end:
            mass = sum(_residual(prefix_ratio, target_rows[i + 1], draft_rows[i + 1]))
            shortfall = mass + 1.0 - prefix_ratio
            threshold = mass / shortfall if shortfall > 0.0 else 1.0
        if accept_uniforms[i] <= threshold:
            num_kept, kept_ratio = i + 1, prefix_ratio
    if num_kept == end:
        return _finish(drafts[:end], target_rows[end], resample_uniforms[end])
    weights = _residual(kept_ratio, target_rows[num_kept], draft_rows[num_kept])
    return num_kept, [*drafts[:num_kept], _draw(weights, resample_uniforms[num_kept])]


def coupled_verify_naive(
    drafts: list[int], target_rows: list[Row], gumbel: list[Row]
) -> tuple[int, list[int]]:
    """Plain decoding with the noise of each place, for as long as the drafts are what it draws."""
    emitted: list[int] = []
    for i, row in enumerate(target_rows):
        if not _is_law(row):
            break
        scores = [
            math.log(p) + noise if p > 0.0 else -math.inf
            for p, noise in zip(row, gumbel[i], strict=True)
        ]
        emitted.append(scores.index(max(scores)))
        if i == len(drafts) or drafts[i] != emitted[-1]:
            break
    return max(len(emitted) - 1, 0), emitted


def _end_of_window(drafts: list[int], draft_rows: list[Row], target_rows: list[Row]) -> int:
    """Number of drafts that can be judged: drawn, from a law, and met by a law."""
    for i, draft in enumerate(drafts):
        if draft == PLACEHOLDER_TOKEN_ID or not _is_law(target_rows[i]):
            return i
        if not _is_law(draft_rows[i]) or draft_rows[i][draft] <= 0.0:
            return i
    return len(drafts)


def _finish(kept: list[int], target_row: Row, uniform: float) -> tuple[int, list[int]]:
    """Every draft was kept: one more token, unless there is no law to draw it from."""
    if _is_law(target_row):
        return len(kept), [*kept, _draw(target_row, uniform)]
    return max(len(kept) - 1, 0), kept


def _residual(scale: float, target_row: Row, draft_row: Row) -> Row:
    return [max(scale * p - q, 0.0) for p, q in zip(target_row, draft_row, strict=True)]


def _draw(weights: Row, uniform: float) -> int:
    """Inverse CDF; never an id of weight 0."""
    left = uniform * sum(weights)
    for token_id, weight in enumerate(weights):
        if weight > left:
            return token_id
        left -= weight
    return max(token_id for token_id, weight in enumerate(weights) if weight > 0.0)


def _is_law(row: Row) -> bool:
    return math.isfinite(sum(row)) and sum(row) > 0.0


def _one_hot_rows(drafts: list[int], vocab_size: int) -> list[Row]:
    return [[float(token_id == draft) for token_id in range(vocab_size)] for draft in drafts]
