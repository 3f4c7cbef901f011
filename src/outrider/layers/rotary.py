"""Rotary position embedding over the first dimensions of a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotates pairs (j, j + rotary_dim / 2) of the first `rotary_dim` dimensions.

    Text positions are the same on all axes of the multimodal scheme, which makes it the ordinary
    one. Cosines and sines are tabulated in the dtype of the model for the positions there can be.

    Args:
        rotary_dim: dimensions that turn; the rest pass through.
        theta: base of the frequencies.
        max_positions: rows of the table.
    """

    def __init__(self, rotary_dim: int, theta: float, max_positions: int) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.theta = theta
        self.max_positions = max_positions
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def build(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fills the tables; called once the model's device and dtype are known."""
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        frequencies = (self.theta**-exponent).to(torch.float32)
        places = torch.arange(self.max_positions, dtype=torch.float32)
        angles = torch.outer(places, frequencies)
        self.cos = angles.cos().to(device, dtype)
        self.sin = angles.sin().to(device, dtype)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[...] int64 to cosines and sines [..., rotary_dim / 2]."""
        return self.cos[positions], self.sin[positions]

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates [..., D]; the angles broadcast against [..., rotary_dim / 2]."""
        cos, sin = angles
        half = self.rotary_dim // 2
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, dim=-1)
