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
from outrider.training.objective import Predictions, predict

if TYPE_CHECKING:
    from outrider.models.qwen4_exp.config import Qwen4ExpConfig
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.training.corpus import TokenArray


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out windows, teacher-forced, in the attention of inference.

    Past the budget of its indexers the model attends to the blocks that they choose. What that
    costs shows beside attention to everything: on all rows, and on those past the budget alone,
    which are None where the windows end before it.
    """

    trunk_loss: float  # nats a token
    bits_per_byte: float
    dense_bits_per_byte: float  # with attention to everything
    num_rows_past_budget: int
    loss_past_budget: float | None  # nats a token
    dense_loss_past_budget: float | None
    attended_share_past_budget: float | None  # of the keys that attention to everything reads
    depth_losses: list[float]  # nats a token
    agreement_per_depth: list[float]  # argmax is the trunk's: acceptance at temperature 0
    overlap_per_depth: list[float]  # mass that both laws share: acceptance at temperature 1
    # 1 + the agreeing depths before the first that does not: what greedy drafting would reach if
    # the text were the trunk's own. None without a head.
    chained_acceptance_length: float | None

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


class _Mean:
    """A running mean of losses, each weighted by its rows."""

    def __init__(self) -> None:
        self._sum = 0.0
        self.num_rows = 0

    def add(self, loss: Tensor, num_rows: int) -> None:
        self._sum += loss.item() * num_rows
        self.num_rows += num_rows

    @property
    def value(self) -> float:
        return self._sum / self.num_rows


class _TrunkMeans:
    """The trunk's loss over all rows and over those past the budget."""

    def __init__(self, dense_limit: int) -> None:
        self._dense_limit = dense_limit
        self.all_rows = _Mean()
        self.past_budget = _Mean()

    def add(self, logits: Tensor, window: Tensor) -> None:
        self.all_rows.add(
            mtp_loss.next_token_loss(logits, window), mtp_loss.input_ids(window).numel()
        )
        # Row p sees p + 1 keys.
        late_logits, late = logits[:, self._dense_limit :], window[:, self._dense_limit :]
        if late_logits.numel():
            self.past_budget.add(
                mtp_loss.next_token_loss(late_logits, late), mtp_loss.input_ids(late).numel()
            )


class _HeadMeans:
    """Loss, agreement and overlap of the head by depth."""

    def __init__(self, num_depths: int) -> None:
        self.losses = [_Mean() for _ in range(num_depths)]
        self.overlaps = [_Mean() for _ in range(num_depths)]
        self._num_agreed = [0] * num_depths
        self._num_compared = [0] * num_depths
        self._num_accepted = self._num_started = 0

    def add(self, predictions: Predictions, window: Tensor) -> None:
        for depth, logits in enumerate(predictions.depths):
            loss = mtp_loss.draft_loss(logits, window, depth)
            self.losses[depth].add(loss, logits[:, depth:, 0].numel())
            overlap = mtp_loss.draft_acceptance(predictions.trunk, logits, depth)
            self.overlaps[depth].add(overlap, logits[:, depth:-1, 0].numel())
        agreements = mtp_loss.draft_agreement(predictions.trunk, predictions.depths)
        for depth, agreement in enumerate(agreements):
            self._num_agreed[depth] += int(agreement.sum())
            self._num_compared[depth] += agreement[:, depth:].numel()
        if agreements:
            accepted = mtp_loss.num_chained(agreements)
            self._num_accepted += int(accepted.sum())
            self._num_started += accepted.numel()

    @property
    def agreement(self) -> list[float]:
        return [a / b for a, b in zip(self._num_agreed, self._num_compared, strict=True)]

    @property
    def chained_acceptance_length(self) -> float | None:
        return 1.0 + self._num_accepted / self._num_started if self._num_started else None


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
        model: with an MTP head, unless `num_depths` is 0.
        windows: [N, T+2] int64, any device.
        num_depths: depths to unroll the head to.
        bytes_per_token: of the windows' targets, end-of-text ids included.
        batch_size: windows at once.
    """
    device = model.lm_head.weight.device
    sparse, dense = (_TrunkMeans(model.config.index_dense_limit) for _ in range(2))
    head = _HeadMeans(num_depths)
    for batch in windows.split(batch_size):
        window = batch.to(device)
        predictions = predict(model, window, num_depths)
        sparse.add(predictions.trunk, window)
        head.add(predictions, window)
        dense.add(predict(model, window, 0, dense_attention=True).trunk, window)
    num_late = sparse.past_budget.num_rows
    trunk_loss = sparse.all_rows.value
    nats_to_bits_per_byte = 1.0 / math.log(2.0) / bytes_per_token
    return Evaluation(
        trunk_loss=trunk_loss,
        bits_per_byte=trunk_loss * nats_to_bits_per_byte,
        dense_bits_per_byte=dense.all_rows.value * nats_to_bits_per_byte,
        num_rows_past_budget=num_late,
        loss_past_budget=sparse.past_budget.value if num_late else None,
        dense_loss_past_budget=dense.past_budget.value if num_late else None,
        attended_share_past_budget=_attended_share(model.config, mtp_loss.input_ids(windows)),
        depth_losses=[mean.value for mean in head.losses],
        agreement_per_depth=head.agreement,
        overlap_per_depth=[mean.value for mean in head.overlaps],
        chained_acceptance_length=head.chained_acceptance_length,
    )


def _attended_share(config: Qwen4ExpConfig, token_ids: Tensor) -> float | None:
    """Mean share of the visible keys that a row past the budget reads, of windows [N, T]."""
    ratio = config.indexer_compress_ratio
    # The blocks that are chosen, and the rows of the block that is not complete.
    shares = [
        (config.num_index_blocks * ratio + num_visible % ratio) / num_visible
        for num_visible in range(config.index_dense_limit + 1, token_ids.shape[1] + 1)
    ]
    return sum(shares) / len(shares) if shares else None
