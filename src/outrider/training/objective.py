"""The joint loss of trunk and head for one batch, the head unrolled on its own feedback."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.qwen4_exp.decoder_layer import SequenceOptions, SequenceOutput
from outrider.ops.cross_entropy import linear_cross_entropy
from outrider.training import mtp_loss

if TYPE_CHECKING:
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.training.config import LossConfig


@dataclass(frozen=True)
class Losses:
    """Scalars of one batch, still attached to the graph."""

    total: Tensor
    trunk: Tensor  # cross entropy, nats
    depths: list[Tensor]  # one a depth, of the kind that the configuration names
    router_balance: Tensor  # of the trunk's layers
    mtp_router_balance: Tensor  # of the head's, 0 without a head
    index: Tensor

    def to_dict(self) -> dict[str, float | list[float]]:
        """Returns plain numbers for the log."""
        return {
            "loss": self.total.item(),
            "trunk": self.trunk.item(),
            "depths": [loss.item() for loss in self.depths],
            "router_balance": self.router_balance.item(),
            "mtp_router_balance": self.mtp_router_balance.item(),
            "index": self.index.item(),
        }


@dataclass(frozen=True)
class Predictions:
    """What trunk and head say of one batch of windows; logits are computed when asked for."""

    trunk_rows: Tensor  # [B, T, C], what the vocabulary head reads
    depth_rows: list[Tensor]  # one [B, T, C] a depth, aligned as in mtp_loss
    vocabulary: Tensor  # [V, C], the weight of lm_head
    mtp_vocabulary: Tensor  # the same, as the head's gradient reaches it
    router_logits: tuple[Tensor, ...]  # one [B*T, E] a layer of the trunk
    mtp_router_logits: tuple[Tensor, ...]  # one [B*T, E] a depth of the head
    index_losses: tuple[Tensor, ...]

    @cached_property
    def trunk(self) -> Tensor:
        """Logits of the trunk, [B, T, V]."""
        return F.linear(self.trunk_rows, self.vocabulary)

    @cached_property
    def depths(self) -> list[Tensor]:
        """Logits of the head, one [B, T, V] a depth."""
        return [F.linear(rows, self.mtp_vocabulary) for rows in self.depth_rows]


def predict(
    model: Qwen4ExpForCausalLM,
    window: Tensor,
    num_depths: int,
    *,
    detach_trunk: bool = False,
    dense_attention: bool = False,
    want_index_losses: bool = False,
) -> Predictions:
    """Runs the trunk, then the head to `num_depths`.

    Args:
        model: with an MTP head, unless `num_depths` is 0.
        window: [B, T+2] int64.
        num_depths: how often the head feeds itself; what is trained is what drafting does. 0 runs
            the trunk alone.
        detach_trunk: keep the head's gradient from the trunk's streams, the embedding and lm_head.
        dense_attention: attend to everything visible. Training does, so that the indexers learn
            what dense attention looks at and nothing depends on what they choose before.
        want_index_losses: compute what the indexers are trained on.
    """
    options = SequenceOptions(dense_attention, want_index_losses)
    trunk = model.model.forward_sequence(mtp_loss.input_ids(window), options)
    depths: list[SequenceOutput] = []
    if num_depths:
        if model.mtp is None:
            raise ValueError("the model has no MTP head to train")
        streams = trunk.streams
        next_embeds = model.model.embed_tokens(mtp_loss.next_ids(window))
        if detach_trunk:
            streams, next_embeds = streams.detach(), next_embeds.detach()
        depths = model.mtp.unroll(streams, next_embeds, num_depths, options)
    vocabulary = model.lm_head.weight
    return Predictions(
        trunk_rows=model.output_rows(trunk.streams),
        depth_rows=[model.mtp_output_rows(depth.streams) for depth in depths],
        vocabulary=vocabulary,
        mtp_vocabulary=vocabulary.detach() if detach_trunk else vocabulary,
        router_logits=tuple(trunk.router_logits),
        mtp_router_logits=tuple(logits for depth in depths for logits in depth.router_logits),
        index_losses=tuple(loss for one in (trunk, *depths) for loss in one.index_losses),
    )


def joint_loss(
    predictions: Predictions, window: Tensor, config: LossConfig, num_experts_per_tok: int
) -> Losses:
    """Combines the terms with the weights of the configuration.

    Args:
        predictions: of the same window.
        window: [B, T+2] int64.
        config: weights.
        num_experts_per_tok: k of the router.
    """
    trunk = linear_cross_entropy(
        predictions.trunk_rows.flatten(0, 1),
        predictions.vocabulary,
        mtp_loss.next_ids(window).flatten(),
    )
    if config.kind == "ce":
        targets = mtp_loss.draft_targets(window)
        depths = [
            linear_cross_entropy(
                rows[:, depth:].flatten(0, 1),
                predictions.mtp_vocabulary,
                targets[:, depth:].flatten(),
            )
            for depth, rows in enumerate(predictions.depth_rows)
        ]
    else:
        depths = [
            depth_loss(predictions.trunk, logits, window, depth, config)
            for depth, logits in enumerate(predictions.depths)
        ]
    # Apart, so that a head leaves the weight of the trunk's routers as it is without one.
    balance = mtp_loss.load_balancing_loss(predictions.router_logits, num_experts_per_tok)
    mtp_balance = index = trunk.new_zeros(())
    if predictions.mtp_router_logits:
        mtp_balance = mtp_loss.load_balancing_loss(
            predictions.mtp_router_logits, num_experts_per_tok
        )
    if predictions.index_losses:
        index = torch.stack(list(predictions.index_losses)).sum()
    total = trunk + config.router_balance_weight * (balance + mtp_balance)
    total = total + config.index_weight * index
    if depths:
        head = mtp_loss.weighted_depth_loss(depths, config.depth_weights)
        total = total + config.mtp_weight * head
    return Losses(total, trunk, depths, balance, mtp_balance, index)


def depth_loss(
    trunk_logits: Tensor,
    logits: Tensor,
    window: Tensor,
    spec_step_idx: int,
    config: LossConfig,
    mask: Tensor | None = None,
) -> Tensor:
    """The head's loss at one depth, of the kind that the configuration names.

    Args:
        trunk_logits: [B, T, V]; they teach and get no gradient.
        logits: [B, T, V], the head's at this depth.
        window: [B, T+2] int64.
        spec_step_idx: the depth, 0-based.
        config: kind and lambda.
        mask: [B, T] bool, rows of the head that count; None is all of them.
    """
    match config.kind:
        case "ce":
            return mtp_loss.draft_loss(logits, window, spec_step_idx, mask)
        case "kl":
            return mtp_loss.draft_kl(trunk_logits, logits, spec_step_idx, mask)
        case "lk":
            return mtp_loss.draft_lk(trunk_logits, logits, spec_step_idx, config.lk_lambda, mask)
