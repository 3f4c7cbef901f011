"""Reference of the gated residual: the formulas, one stream after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def read_streams_naive(
    streams: Tensor,
    norm_weight: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The input of a block and the strength with which its output goes back.

        n = x / rms(x) (1 + w) per stream;  m = silu(Wd n / S);  a = sigmoid(Wu m)
        input = mean_s(a_s * n_s);  c = 2 sigmoid(Wi n / S)

    Args:
        streams: [N, S, C].
        norm_weight: w, [S, C].
        down: Wd, [R, S * C].
        up: Wu, [S * C, R].
        inject: Wi, [S, S * C], or None.
        eps: added to the mean square.

    Returns:
        The input [N, C] and the strength [N, S], [N, 0] without `inject`.
    """
    num_rows, num_streams, width = streams.shape
    normed = [
        streams[:, s]
        / (streams[:, s].square().mean(-1, keepdim=True) + eps).sqrt()
        * (1.0 + norm_weight[s])
        for s in range(num_streams)
    ]
    flat = torch.cat(normed, dim=-1)
    gate = torch.sigmoid(F.silu(flat @ down.t() / num_streams) @ up.t())
    gates = gate.split(width, dim=-1)
    mixed = torch.stack([a * n for a, n in zip(gates, normed, strict=True)]).mean(0)
    if inject is None:
        return mixed, streams.new_empty(num_rows, 0)
    return mixed, 2.0 * torch.sigmoid(flat @ inject.t() / num_streams)
