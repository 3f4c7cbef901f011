"""Root-mean-square normalisation, over groups of the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.ops.normalise import rms_rows


def rms_normalise(x: Tensor, eps: float) -> Tensor:
    """X / rms(x) over the last dimension, in float32 or better, in the dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


# Under the root of the norms of keys and queries, from the architecture.
L2_EPS = 1e-6


def l2_normalise(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """X / sqrt(sum x^2 + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), or * weight where `is_plain`.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.
        group_size: elements that share one mean; the whole dimension if None.
        is_plain: the stored weight is the factor itself.
    """

    def __init__(
        self, dim: int, eps: float, *, group_size: int | None = None, is_plain: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.group_size = group_size or dim
        self.is_plain = is_plain

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        scale = self.weight if self.is_plain else 1.0 + self.weight
        if self.group_size == x.shape[-1]:
            return rms_normalise(x, self.eps) * scale
        return (rms_normalise(x.unflatten(-1, (-1, self.group_size)), self.eps)).flatten(-2) * scale

    def forward_sequence(self, x: Tensor) -> Tensor:
        """The same for training: fewer passes over memory, in the dtype of x."""
        scale = self.weight if self.is_plain else 1.0 + self.weight
        if self.group_size == x.shape[-1]:
            return rms_rows(x, scale, self.eps)
        grouped = x.unflatten(-1, (-1, self.group_size))
        return rms_rows(grouped, scale.view(-1, self.group_size), self.eps).flatten(-2)
