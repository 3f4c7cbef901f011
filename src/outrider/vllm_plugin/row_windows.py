"""The rows of a pass, by request: what a layer that mixes over the sequence works on.

vLLM hands over the rows of all requests one after another. Requests with the same number of rows
are mixed together, so that a decode step is one window and a prompt is one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from torch import Tensor


@dataclass(frozen=True)
class RowWindow:
    """Requests with the same number of rows.

    Attributes:
        requests: [b] int64, places in the batch.
        rows: [b, L] int64, rows of the flattened batch.
    """

    requests: Tensor
    rows: Tensor


def row_windows(
    query_start_loc: Sequence[int], kinds: Iterable[Hashable] | None = None
) -> list[RowWindow]:
    """Groups the requests of a batch by their number of rows.

    Args:
        query_start_loc: first row of each request, and one past the last row.
        kinds: one for each request; requests of different kinds are never put together.

    Returns:
        Windows in the order in which their first requests stand; a request without rows is in none.
    """
    num_requests = len(query_start_loc) - 1
    kinds = [None] * num_requests if kinds is None else list(kinds)
    members: dict[tuple[int, Hashable], list[int]] = {}
    for request, kind in enumerate(kinds):
        length = query_start_loc[request + 1] - query_start_loc[request]
        if length:
            members.setdefault((length, kind), []).append(request)
    windows = []
    for (length, _), requests in members.items():
        starts = torch.tensor([query_start_loc[request] for request in requests])
        windows.append(RowWindow(torch.tensor(requests), starts[:, None] + torch.arange(length)))
    return windows
