"""The streams of a frozen trunk over texts, kept for the epochs to come.

A trunk that does not change gives the same streams each time, and running it takes longer than
training the one layer behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outrider.models.qwen4_exp.model import Qwen4ExpModel


class TrunkStreams:
    """Runs a trunk without gradient, its attention sparse past the budget as at inference.

    Args:
        trunk: does not change while this is used.
        max_bytes: kept at most, on the trunk's device; texts beyond it are run each time.
    """

    def __init__(self, trunk: Qwen4ExpModel, max_bytes: int) -> None:
        self._trunk = trunk
        self._num_bytes_left = max_bytes
        self._kept: dict[int, Tensor] = {}

    @torch.no_grad()
    def of(self, text_ids: list[int], token_ids: Tensor, lengths: list[int]) -> Tensor:
        """Streams of a batch of texts.

        Args:
            text_ids: what each text is known by from one call to the next.
            token_ids: [B, T] int64 on the trunk's device, padded at the end.
            lengths: rows of each text, without the padding.

        Returns:
            [B, T, W], after the last layer and before the mixer; what the padding's rows hold is
            finite and no more.
        """
        if not self._kept.keys() >= set(text_ids):
            streams = self._trunk.forward_sequence(token_ids).streams
            for row, (text_id, length) in enumerate(zip(text_ids, lengths, strict=True)):
                self._keep(text_id, streams[row, :length])
            return streams
        width = self._kept[text_ids[0]].shape[-1]
        streams = token_ids.new_zeros((*token_ids.shape, width), dtype=self._dtype)
        for row, text_id in enumerate(text_ids):
            streams[row, : len(self._kept[text_id])] = self._kept[text_id]
        return streams

    @property
    def _dtype(self) -> torch.dtype:
        return self._trunk.embed_tokens.weight.dtype

    def _keep(self, text_id: int, streams: Tensor) -> None:
        num_bytes = streams.numel() * streams.element_size()
        if text_id not in self._kept and num_bytes <= self._num_bytes_left:
            self._num_bytes_left -= num_bytes
            # A copy of its own: a view would keep the whole batch.
            self._kept[text_id] = streams.clone()
