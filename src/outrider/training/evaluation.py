"""Held-out measurements: bits per byte of the trunk, loss and agreement of the head by depth."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.training import mtp_loss
from outrider.training.objective import predict

if TYPE_CHECKING:
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.training.corpus import TokenArray


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out windows, teacher-forced."""

    trunk_loss: float  # nats a token
    bits_per_byte: float
    depth_losses: list[float]  # nats a token
    agreement_per_depth: list[float]  # head's argmax equals the trunk's
    # 1 + the agreeing depths before the first that does not: what greedy drafting would reach if
    # the text were the trunk's own.
    chained_acceptance_length: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain numbers for the log."""
        return asdict(self)


def evaluation_windows(tokens: TokenArray, sequence_length: int, num_windows: int) -> Tensor:
    """Picks windows spread evenly over the held-out text, [num_windows, T+2] int64."""
    size = sequence_length + mtp_loss.NUM_LOOKAHEAD_IDS
    if len(tokens.token_ids) < size:
        raise OutriderError(f"held-out text has {len(tokens.token_ids)} tokens, {size} are needed")
    starts = np.linspace(0, len(tokens.token_ids) - size, num_windows).astype(np.int64)
    rows = tokens.token_ids[starts[:, None] + np.arange(size)]
    return torch.from_numpy(rows.astype(np.int64))


@torch.no_grad()
def evaluate(
    model: Qwen4ExpForCausalLM,
    windows: Tensor,
    *,
    num_depths: int,
    bytes_per_token: float,
    batch_size: int,
) -> Evaluation:
    """Runs the model over the windows.

    Args:
        model: with an MTP head.
        windows: [N, T+2] int64, any device.
        num_depths: depths to unroll the head to.
        bytes_per_token: of the held-out text, end-of-text ids included.
        batch_size: windows at once.
    """
    device = model.lm_head.weight.device
    trunk_loss = 0.0
    depth_losses = [0.0] * num_depths
    num_agreed = [0] * num_depths
    num_compared = [0] * num_depths
    num_accepted = num_windows_started = 0
    for batch in windows.split(batch_size):
        window = batch.to(device)
        share = len(batch) / len(windows)
        predictions = predict(model, window, num_depths)
        trunk_loss += share * mtp_loss.next_token_loss(predictions.trunk, window).item()
        for depth, logits in enumerate(predictions.depths):
            depth_losses[depth] += share * mtp_loss.draft_loss(logits, window, depth).item()
        agreements = mtp_loss.draft_agreement(predictions.trunk, predictions.depths)
        for depth, agreement in enumerate(agreements):
            num_agreed[depth] += int(agreement.sum())
            num_compared[depth] += agreement[:, depth:].numel()
        accepted = mtp_loss.num_chained(agreements)
        num_accepted += int(accepted.sum())
        num_windows_started += accepted.numel()
    return Evaluation(
        trunk_loss=trunk_loss,
        bits_per_byte=trunk_loss / math.log(2.0) / bytes_per_token,
        depth_losses=depth_losses,
        agreement_per_depth=[a / b for a, b in zip(num_agreed, num_compared, strict=True)],
        chained_acceptance_length=1.0 + num_accepted / num_windows_started,
    )
