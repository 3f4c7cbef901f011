"""The gated delta rule over whole chunks: matrix products in place of a loop over rows.

With G the running sum of g inside a chunk and D_ij = exp(G_i - G_j) for i >= j, the values that
the rows really write solve one unit lower triangular system

    (I + A) V' = beta v - beta k exp(G) M,   A_ij = beta_i (k_i . k_j) D_ij  for i > j

and the outputs and the next state are products with V' (arXiv:2412.06464, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_SIZE = 64  # rows a chunk; the triangular system grows with its square


@dataclass
class StateProbe:
    """Collects states as they are after some of the rows, at the cost of one more fold each.

    Attributes:
        stops: request and number of its rows, 1 to T; ascending in the number for each request.
        states: [h, dk, dv] for each stop, in the same order where all rows are in one chunk or all
            stops are of one request.
    """

    stops: Sequence[tuple[int, int]]
    states: list[Tensor] = field(default_factory=list)

    def record(
        self, start: int, k: Tensor, cumulative: Tensor, written: Tensor, state: Tensor
    ) -> None:
        """Takes up the stops of one chunk.

        Args:
            start: rows before the chunk.
            k: [b, h, n, dk].
            cumulative: [b, h, n], running sums of the log decays.
            written: [b, h, n, dv], the values that the rows write.
            state: [b, h, dk, dv] before the chunk.
        """
        for request, num_rows in self.stops:
            count = num_rows - start
            if not 0 < count <= k.shape[2]:
                continue
            sums = cumulative[request, :, :count]
            weights = (sums[:, -1:] - sums).exp()
            added = (k[request, :, :count] * weights[..., None]).transpose(-1, -2)
            kept = sums[:, -1, None, None].exp() * state[request]
            self.states.append(kept + added @ written[request, :, :count])


def _unit_lower_solve(strictly_lower: Tensor, rhs: Tensor) -> Tensor:
    """Solves (I + A) X = rhs for a strictly lower triangular A, by forward substitution.

    The product (I - A)(I + A^2)(I + A^4)... is the same inverse, but where keys repeat the powers
    cancel: at 16 rows of one key it is wrong by 4e-3 in float32, this by 1e-6.

    Args:
        strictly_lower: [..., n, n].
        rhs: [..., n, m].
    """
    solution: Tensor = torch.linalg.solve_triangular(
        strictly_lower, rhs, upper=False, left=True, unitriangular=True
    )
    return solution


def _one_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    is_folded: Tensor | None,
    probe: StateProbe | None = None,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """One chunk, heads first.

    Args:
        q: [b, h, n_q, dk], for the last n_q of the n rows.
        k: [b, h, n, dk].
        v: [b, h, n, dv].
        g: [b, h, n].
        beta: [b, h, n].
        state: [b, h, dk, dv] before the chunk.
        is_folded: [b, n] bool, a prefix: rows that enter the returned state; None for all.
        probe: collects states on the way.
        start: rows before the chunk.

    Returns:
        Outputs [b, h, n_q, dv] and the state after the folded rows.
    """
    n = k.shape[2]
    cumulative = g.cumsum(-1)
    lower = torch.ones(n, n, dtype=torch.bool, device=k.device).tril()
    decay = (cumulative[..., :, None] - cumulative[..., None, :]).masked_fill(~lower, -torch.inf)
    decay = decay.exp()
    k_beta = k * beta[..., None]
    interaction = ((k_beta @ k.transpose(-1, -2)) * decay).tril(-1)
    growth = cumulative.exp()[..., None]
    written = _unit_lower_solve(interaction, v * beta[..., None] - (k_beta * growth) @ state)
    if probe is not None:
        probe.record(start, k, cumulative, written, state)

    num_queries = q.shape[2]
    outputs = (q * growth[..., n - num_queries :, :]) @ state + (
        (q @ k.transpose(-1, -2)) * decay[..., n - num_queries :, :]
    ) @ written
    if is_folded is None:
        last = cumulative[..., -1:]
        weights = (last - cumulative).exp()
    else:
        masked = is_folded[:, None, :]
        last = torch.where(masked, g, 0.0).sum(-1, keepdim=True)
        weights = (last - cumulative).masked_fill(~masked, -torch.inf).exp()
    state = last.exp()[..., None] * state + (k * weights[..., None]).transpose(-1, -2) @ written
    return outputs, state


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    is_folded: Tensor | None = None,
    probe: StateProbe | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule for many rows; same law as `gated_delta_rule_naive`.

    Rows that are not folded still act on the outputs of the rows after them, but leave no trace
    in the returned state: that is how a window of drafts is read without being committed. There
    may be more key rows than query rows; the surplus rows come first and yield no output.

    Args:
        q: [b, Tq, h, dk], queries of the last Tq rows, normalised and scaled.
        k: [b, T, h, dk], normalised.
        v: [b, T, h, dv].
        g: [b, T, h], log decay.
        beta: [b, T, h].
        state: [b, h, dk, dv] before the first row, None for zeros; not modified.
        is_folded: [b, T] bool, a prefix per request, None for all rows. Only for T <= CHUNK_SIZE.
        probe: collects states on the way.

    Returns:
        Outputs [b, Tq, h, dv] and the state [b, h, dk, dv] after the folded rows.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    g, beta = g.transpose(1, 2), beta.transpose(1, 2)
    b, heads, num_rows, dk = k.shape
    if state is None:
        state = k.new_zeros(b, heads, dk, v.shape[-1])
    if num_rows <= CHUNK_SIZE:
        outputs, state = _one_chunk(q, k, v, g, beta, state, is_folded, probe)
        return outputs.transpose(1, 2), state
    assert is_folded is None, "a window with drafts must fit into one chunk"
    surplus = num_rows - q.shape[2]
    pieces = []
    for start in range(0, num_rows, CHUNK_SIZE):
        rows = slice(start, start + CHUNK_SIZE)
        queries = q[:, :, max(start - surplus, 0) : max(start + CHUNK_SIZE - surplus, 0)]
        outputs, state = _one_chunk(
            queries,
            k[:, :, rows],
            v[:, :, rows],
            g[..., rows],
            beta[..., rows],
            state,
            None,
            probe,
            start,
        )
        pieces.append(outputs)
    return torch.cat(pieces, dim=2).transpose(1, 2), state


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One row a request, the shape of plain decoding: fewer operations than a chunk of one.

    Args:
        q: [b, 1, h, dk].
        k: [b, 1, h, dk].
        v: [b, 1, h, dv].
        g: [b, 1, h].
        beta: [b, 1, h].
        state: [b, h, dk, dv], not modified.

    Returns:
        Outputs [b, 1, h, dv] and the state after the row.
    """
    key = k[:, 0, :, :, None]
    state = state * g[:, 0, :, None, None].exp()
    read = key.transpose(-1, -2) @ state
    state = state + key * (beta[:, 0, :, None, None] * (v[:, 0, :, None, :] - read))
    outputs = q[:, 0, :, None, :] @ state
    return outputs.transpose(1, 2), state
