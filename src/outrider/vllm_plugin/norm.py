"""Norms that count in float32 in a model of lower precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.layers.norm import RMSNorm


class Float32RMSNorm(RMSNorm):
    """An RMSNorm with its weight and its arithmetic in float32; the result has the input's dtype.

    Args:
        like: the norm to stand in for.
    """

    def __init__(self, like: RMSNorm) -> None:
        super().__init__(
            len(like.weight), like.eps, group_size=like.group_size, is_plain=like.is_plain
        )
        self.weight = nn.Parameter(torch.empty(len(like.weight), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        return super().forward(x.float()).to(x.dtype)


def widen_norms(module: nn.Module) -> None:
    """Puts a Float32RMSNorm in the place of every RMSNorm below a module."""
    for name, child in module.named_children():
        if type(child) is RMSNorm:
            setattr(module, name, Float32RMSNorm(child))
        else:
            widen_norms(child)
