"""Tunes an MTP head on what its own trunk wrote; trunk, embedding and lm_head stay as they are.

A head drafts continuations of the trunk's text, so that text is what it is trained on: the rows
count whose target was generated, and the head reads the streams that the trunk has at inference,
its attention sparse past the budget. Who generates is the caller's business.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError, RequestError
from outrider.models.qwen4_exp.decoder_layer import SequenceOptions
from outrider.training import mtp_loss
from outrider.training.config import LossConfig, OptimizerConfig, ScheduleConfig
from outrider.training.objective import depth_loss
from outrider.training.schedule import Progress, set_learning_rate
from outrider.training.trainer import make_optimizer
from outrider.training.trunk_streams import TrunkStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

logger = logging.getLogger(__name__)

# FastMTP's weights at three depths, 0.51, 0.31 and 0.18, are these powers normalised.
_DEPTH_DECAY = 0.6
# Fills the end of a shorter text. Rows behind it see nothing of it, and it is nobody's target.
_PADDING_ID = 0


@dataclass(frozen=True)
class Continuation:
    """A text that the model has written.

    Attributes:
        token_ids: of the prompt and of what follows it.
        num_prompt_tokens: how many of them are the prompt's.
    """

    token_ids: list[int]
    num_prompt_tokens: int


@dataclass(frozen=True)
class TuneConfig:
    """How a head is tuned.

    Attributes:
        loss: kind, lambda, and the weights of as many depths as are to be drafted; the trunk's
            terms have no part.
        optimizer: AdamW, on the head's parameters.
        num_epochs: how often each text is seen.
        max_minutes: ends the tuning earlier, its learning rate decayed by then; None is no limit.
            Where it does, the result depends on the machine.
        warmup_steps: until the learning rate is at its peak; a tenth of the steps at most.
        batch_size: texts of a step.
        max_stream_bytes: of the trunk's streams that are kept from one epoch to the next.
        seed: of the order of the texts.
    """

    loss: LossConfig
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-3, weight_decay=0.0)
    )
    num_epochs: int = 3
    max_minutes: float | None = None
    warmup_steps: int = 20
    batch_size: int = 8
    max_stream_bytes: int = 4 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks what the parts do not."""
        for name in ("num_epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not at least 1")
        for name, value in (
            ("max_minutes", self.max_minutes),
            ("learning_rate", self.optimizer.learning_rate),
        ):
            if value is not None and not 0.0 < value < float("inf"):
                raise ConfigError(f"{name}: {value} is not a number above 0")


@dataclass(frozen=True)
class TuneStep:
    """What a step was like.

    Attributes:
        fraction: of the whole tuning that is done.
        depth_losses: one a depth.
        tokens_per_s: generated tokens trained on, each at all depths.
    """

    fraction: float
    depth_losses: list[float]
    tokens_per_s: float


@dataclass(frozen=True)
class TuneReport:
    """What a tuning was like.

    Attributes:
        num_steps: of the optimiser.
        num_tokens: generated tokens trained on, over all epochs.
        elapsed_s: wall clock.
        first_losses: one a depth, mean over the first tenth of the steps.
        last_losses: one a depth, mean over the last tenth.
    """

    num_steps: int
    num_tokens: int
    elapsed_s: float
    first_losses: list[float]
    last_losses: list[float]


def depth_weights(num_depths: int) -> tuple[float, ...]:
    """Weights of the depths for any K, decaying as FastMTP's do (arXiv:2509.18362)."""
    return tuple(_DEPTH_DECAY**depth for depth in range(num_depths))


class HeadTuner:
    """Trains `model.mtp` and nothing else.

    The same texts, configuration and weights give the same head, unless `max_minutes` ends it.

    Args:
        model: with an MTP head, float32 or better, on the device to train on. The trunk's
            parameters are frozen here, the head's are changed by `tune`.
        continuations: any number; those that generated nothing take no part.
        config: how.

    Raises:
        RequestError: no text has a generated token to train on.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        continuations: Sequence[Continuation],
        config: TuneConfig,
    ) -> None:
        if model.mtp is None:
            raise ValueError("the model has no MTP head to tune")
        self._model = model
        self._mtp = model.mtp
        self._config = config
        self._device = model.lm_head.weight.device
        self._texts = [one for one in continuations if num_trained_rows(one)]
        if not self._texts:
            raise RequestError("the model wrote nothing after the prompts: there is no text")
        model.requires_grad_(False)
        model.mtp.requires_grad_(True)
        self._streams = TrunkStreams(model.model, config.max_stream_bytes)
        self._optimizer = make_optimizer(model.mtp, config.optimizer)
        self._order = torch.Generator().manual_seed(config.seed)
        num_steps = config.num_epochs * -(-len(self._texts) // config.batch_size)
        self._schedule = ScheduleConfig(
            max_tokens=config.num_epochs * sum(num_trained_rows(one) for one in self._texts),
            max_minutes=config.max_minutes,
            warmup_steps=min(config.warmup_steps, max(1, num_steps // 10)),
            decay_fraction=0.5,
        )

    def tune(self, on_step: Callable[[TuneStep], object] | None = None) -> TuneReport:
        """Runs all epochs, or until the time is used up.

        Args:
            on_step: told of each step.
        """
        progress, losses = Progress(), []
        start = time.monotonic()
        for text_ids in self._batches():
            if progress.fraction(self._schedule) >= 1.0:
                break
            before = progress.elapsed_s
            num_before = progress.num_tokens
            losses.append(self._step(text_ids, progress))
            progress.elapsed_s = time.monotonic() - start
            if on_step is not None:
                speed = (progress.num_tokens - num_before) / max(progress.elapsed_s - before, 1e-9)
                fraction = min(1.0, progress.fraction(self._schedule))
                on_step(TuneStep(fraction, losses[-1], speed))
        tenth = -(-len(losses) // 10)
        return TuneReport(
            num_steps=len(losses),
            num_tokens=progress.num_tokens,
            elapsed_s=progress.elapsed_s,
            first_losses=_means(losses[:tenth]),
            last_losses=_means(losses[-tenth:]),
        )

    def _batches(self) -> Iterator[list[int]]:
        """Indexes of texts; alike prompts go together, so that what is cut and padded is little."""
        size = self._config.batch_size

        def lengths(index: int) -> tuple[int, int]:
            return self._texts[index].num_prompt_tokens, len(self._texts[index].token_ids)

        for _ in range(self._config.num_epochs):
            shuffled = torch.randperm(len(self._texts), generator=self._order).tolist()
            indexes = sorted(shuffled, key=lengths)
            starts = range(0, len(indexes), size)
            for batch in torch.randperm(len(starts), generator=self._order).tolist():
                yield indexes[starts[batch] : starts[batch] + size]

    def _step(self, text_ids: list[int], progress: Progress) -> list[float]:
        """Trains on a batch; one whose gradient is not finite changes nothing."""
        peak = self._config.optimizer.learning_rate
        set_learning_rate(self._optimizer, progress, self._schedule, peak)
        total, depths = self._losses(text_ids)
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()
        limit = self._config.optimizer.max_grad_norm
        if torch.isfinite(nn.utils.clip_grad_norm_(self._mtp.parameters(), limit)):
            self._optimizer.step()
        else:
            logger.warning("step %d: gradient is not finite, batch skipped", progress.step)
        progress.step += 1
        progress.num_tokens += sum(num_trained_rows(self._texts[index]) for index in text_ids)
        return [loss.item() for loss in depths]

    def _losses(self, text_ids: list[int]) -> tuple[Tensor, list[Tensor]]:
        """The weighted sum of all terms, and the loss of each depth."""
        model, loss = self._model, self._config.loss
        texts = [self._texts[index] for index in text_ids]
        window, mask = (tensor.to(self._device) for tensor in training_window(texts))
        num_depths, num_rows = len(loss.depth_weights), mask.shape[1]
        lengths = [len(text.token_ids) - 1 for text in texts]
        places = torch.arange(num_rows, device=self._device)
        row_mask = places < window.new_tensor(lengths)[:, None]
        streams = self._streams.of(text_ids, mtp_loss.input_ids(window), lengths)
        with torch.no_grad():
            next_embeds = model.model.embed_tokens(mtp_loss.next_ids(window))
        # With fewer than two blocks there is no choice to learn.
        options = SequenceOptions(
            want_index_losses=num_rows >= 2 * model.config.indexer_compress_ratio,
            row_mask=row_mask,
        )
        outputs = self._mtp.unroll(streams, next_embeds, num_depths, options)
        # Logits of the prompts' rows would be half of the work and take part in nothing. The
        # window that is left keeps its alignment, with a row of each depth before the first that
        # counts.
        first = max(0, int(mask.any(dim=0).int().argmax()) - num_depths)
        window, mask = window[:, first:], mask[:, first:]
        with torch.no_grad():
            trunk_logits = model.logits(streams[:, first:])
        depths = [
            depth_loss(
                trunk_logits, model.mtp_logits(output.streams[:, first:]), window, depth, loss, mask
            )
            for depth, output in enumerate(outputs)
        ]
        # Rows of padding, and those without a predecessor at their depth, hold anything.
        router_logits = [
            one[(row_mask & (places >= depth)).flatten()]
            for depth, output in enumerate(outputs)
            for one in output.router_logits
        ]
        total = mtp_loss.weighted_depth_loss(depths, loss.depth_weights)
        total = total + loss.router_balance_weight * mtp_loss.load_balancing_loss(
            router_logits, model.config.num_experts_per_tok
        )
        for index_loss in (one for output in outputs for one in output.index_losses):
            total = total + loss.index_weight * index_loss
        return total, depths


def num_trained_rows(text: Continuation) -> int:
    """Rows of the head whose target was generated: one a token, but for the ids x_0 and x_1."""
    return max(0, len(text.token_ids) - max(text.num_prompt_tokens, 2))


def training_window(batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
    """Texts side by side, as the losses read them.

    Row p of the head predicts x_{p+2}, so it counts where that is a generated id of the text. The
    window is one id longer than the longest text: the trunk's law of a text's last id stands in its
    row T-1, which is the partner of the head's row T-2.

    By example, for a text of the prompt a b and the generated c d (T = 3):

        window    a b c d +        + is padding
        p = 0     predicts c       counts
        p = 1     predicts d       counts
        p = 2     predicts +       does not

    Args:
        batch: at least one text.

    Returns:
        The window [B, T+2] int64, and the rows that count [B, T] bool.
    """
    longest = max(len(text.token_ids) for text in batch)
    window = torch.full((len(batch), longest + 1), _PADDING_ID)
    for row, text in enumerate(batch):
        window[row, : len(text.token_ids)] = torch.tensor(text.token_ids)
    target_places = torch.arange(longest - 1) + mtp_loss.NUM_LOOKAHEAD_IDS
    begins = torch.tensor([text.num_prompt_tokens for text in batch])
    ends = torch.tensor([len(text.token_ids) for text in batch])
    return window, (target_places >= begins[:, None]) & (target_places < ends[:, None])


def _means(losses: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*losses, strict=True)]
