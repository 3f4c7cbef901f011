"""Gated residual over S streams: what a block reads from them and how its output goes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.layers.norm import RMSNorm
from outrider.ops.hyper_connection import inject_streams, read_streams

if TYPE_CHECKING:
    from outrider.models.qwen4_exp.config import Qwen4ExpConfig


class HyperConnection(nn.Module):
    """Mixes S streams into a block's input and injects its output into the raw streams.

        n = RMS(x) per stream;  m = silu(Wd n / S);  a = sigmoid(Wu m)
        input = mean_s(a_s * n_s);  c = 2 sigmoid(Wi n / S);  out_s = x_s + c_s * block(input)

    Args:
        config: the model's configuration.
        has_inject: False for the final mixer, which is only read.
    """

    def __init__(self, config: Qwen4ExpConfig, *, has_inject: bool = True) -> None:
        super().__init__()
        width, rank = config.stream_width, config.hc_lowrank
        self.num_streams = config.hc_count
        self.hc_norm = RMSNorm(width, config.rms_norm_eps, group_size=config.hidden_size)
        self.input_mix_weight_down = nn.Linear(width, rank, bias=False)
        self.input_mix_weight_up = nn.Linear(rank, width, bias=False)
        if has_inject:
            self.block_inject_weight = nn.Linear(width, config.hc_count, bias=False)

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Mixes the streams into one input.

        Args:
            streams: [..., W], stream after stream.

        Returns:
            The input [..., C] and the normalised streams [..., W], which `inject` needs.
        """
        normed = self.hc_norm(streams)
        mix = F.silu(self.input_mix_weight_down(normed) / self.num_streams)
        gate = torch.sigmoid(self.input_mix_weight_up(mix))
        return (gate * normed).unflatten(-1, (self.num_streams, -1)).mean(-2), normed

    def inject(self, streams: Tensor, normed: Tensor, output: Tensor) -> Tensor:
        """Adds a block's output to every stream.

        Args:
            streams: [..., W], raw.
            normed: [..., W], as `read` returned it.
            output: [..., C].

        Returns:
            [..., W].
        """
        gate = 2.0 * torch.sigmoid(self.block_inject_weight(normed) / self.num_streams)
        return streams + (gate[..., None] * output[..., None, :]).flatten(-2)

    def read_sequence(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`read` for training, with a gradient that passes over the streams a few times only.

        Args:
            streams: [B, T, W].

        Returns:
            The input [B, T, C], the strength of the injection [B * T, S] ([B * T, 0] in the final
            mixer), and the streams [B * T, S, C] to inject into.
        """
        weight = self.hc_norm.weight.view(self.num_streams, -1)
        inject = self.block_inject_weight.weight if hasattr(self, "block_inject_weight") else None
        hidden, strength, same = read_streams(
            streams.reshape(-1, *weight.shape),
            weight,
            self.input_mix_weight_down.weight,
            self.input_mix_weight_up.weight,
            inject,
            self.hc_norm.eps,
        )
        return hidden.view(*streams.shape[:-1], -1), strength, same

    def inject_sequence(self, streams: Tensor, strength: Tensor, output: Tensor) -> Tensor:
        """`inject` for training.

        Args:
            streams: [B * T, S, C], as `read_sequence` returned them.
            strength: [B * T, S], as `read_sequence` returned it.
            output: [B, T, C].

        Returns:
            [B, T, W].
        """
        injected = inject_streams(streams, strength, output.reshape(len(streams), -1))
        return injected.view(*output.shape[:-1], -1)
