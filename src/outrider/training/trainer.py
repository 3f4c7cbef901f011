"""The optimiser loop: windows in, a trained trunk and head out."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from outrider.errors import OutriderError
from outrider.ops import native
from outrider.training import mtp_loss
from outrider.training.checkpoint import (
    CHECKPOINTS_FOLDER,
    delete_old_checkpoints,
    latest_checkpoint,
    load_training_checkpoint,
    save_training_checkpoint,
)
from outrider.training.corpus import TokenArray, WindowSampler
from outrider.training.evaluation import Evaluation, evaluate, evaluation_windows
from outrider.training.export import export_checkpoint
from outrider.training.objective import Losses, joint_loss, predict
from outrider.training.run_log import LOG_FILE, RunLog
from outrider.training.schedule import Progress, set_learning_rate
from outrider.training.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.training.config import OptimizerConfig, TrainConfig

logger = logging.getLogger(__name__)

EXPORTS_FOLDER = "exports"
# Tables of which a step touches few rows: decay would wear away what rare tokens learned.
_UNDECAYED_SUFFIXES = ("embed_tokens.weight", "ngram_embedding.weight", "conv1d.weight")


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Makes AdamW with decay on matrices only: not on vectors, convolutions and embeddings."""
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_decayed = parameter.ndim >= 2 and not name.endswith(_UNDECAYED_SUFFIXES)
        (decayed if is_decayed else undecayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


class TrainingListener(Protocol):
    """Is told of a run as it goes, within the run's own time."""

    def on_step(self, progress: Progress, fraction: float, num_tokens_per_s: float) -> None:
        """After each step.

        Args:
            progress: how far the run has come.
            fraction: of the budget that is used, over 1 after the last step.
            num_tokens_per_s: of this step alone.
        """

    def on_record(self, record: Mapping[str, Any]) -> None:
        """After each record of the log, "kind" is "train" or "eval"."""


@dataclass
class _Speed:
    """Of the steps since the last record, evaluations and checkpoints aside."""

    num_tokens: int = 0
    elapsed_s: float = 0.0

    def add(self, num_tokens: int, elapsed_s: float) -> None:
        self.num_tokens += num_tokens
        self.elapsed_s += elapsed_s


class Trainer:
    """Trains trunk and head together until the budget of the schedule is used up.

    Where the weight of the head's loss is 0, it trains the trunk alone.

    A step is a function of the weights, the optimiser's state and the step number, so that a run
    resumed from a checkpoint continues as if it had not stopped (to the bit, with a token budget).
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        config: TrainConfig,
        *,
        train_tokens: TokenArray,
        held_out_tokens: TokenArray,
        listeners: Sequence[TrainingListener] = (),
    ) -> None:
        """Makes the optimiser and takes up the newest checkpoint of the output folder, if any.

        Args:
            model: with an MTP head if one is to be trained, initialised, on the device to train on.
            config: of the run.
            train_tokens: packed documents.
            held_out_tokens: packed documents that are only measured.
            listeners: are told of steps and records.

        Raises:
            OutriderError: the texts are too short, the output folder cannot be written, or what
                it holds is no run of this model.
        """
        self.model = model
        self.progress = Progress()
        self._config = config
        self._device = model.lm_head.weight.device
        self._optimizer = make_optimizer(model, config.optimizer)
        self._sampler = WindowSampler(
            train_tokens.token_ids,
            window_size=config.data.sequence_length + mtp_loss.NUM_LOOKAHEAD_IDS,
            batch_size=config.data.batch_size,
            seed=config.run.seed,
        )
        self._eval_windows = evaluation_windows(
            held_out_tokens, config.data.sequence_length, config.run.num_eval_windows
        )
        targets = mtp_loss.next_ids(self._eval_windows)
        self._bytes_per_token = float(held_out_tokens.bytes_per_id[targets].mean())
        if config.run.compile:
            native.enable()
        self._workers = Workers(config.run.num_workers)
        self._listeners = listeners
        self._is_stopping = False
        self._checkpoints = config.run.output_dir / CHECKPOINTS_FOLDER
        try:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutriderError(
                f"{self._checkpoints}: cannot be made ({error.strerror or error})"
            ) from error
        newest = latest_checkpoint(self._checkpoints)
        if newest is not None:
            self.progress = load_training_checkpoint(
                newest, model, self._optimizer, self._sampler.identity
            )
            self._set_learning_rate()
            logger.info("going on from %s", newest)
        self._log_file = RunLog(config.run.output_dir / LOG_FILE, self.progress.step)

    def train(self) -> bool:
        """Runs to the end of the budget, writes a last checkpoint and evaluates there.

        Returns:
            Whether the budget is used up; False where `request_stop` ended the run before. It goes
            on from the checkpoint that was written then.
        """
        config = self._config
        # One that a stop at this step has left out.
        self._evaluate_if_due()
        last_checkpoint_s = self.progress.elapsed_s
        speed = _Speed()
        for losses, grad_norm, step_s in self._steps():
            step = self.progress.step
            speed.add(self._num_tokens_per_step, step_s)
            if step % config.run.log_every_steps == 0:
                tokens_per_s = speed.num_tokens / speed.elapsed_s
                self._log(
                    "train", grad_norm=grad_norm, tokens_per_s=tokens_per_s, **losses.to_dict()
                )
                speed = _Speed()
            # Before a checkpoint, from which a run goes on behind this step.
            if self._is_export_due():
                self.export(config.run.output_dir / EXPORTS_FOLDER / f"step-{step:08d}")
            if self._is_stopping:
                self.save()
                return False
            self._evaluate_if_due()
            if (
                self.progress.elapsed_s - last_checkpoint_s
                >= 60 * config.run.checkpoint_every_minutes
            ):
                self.save()
                last_checkpoint_s = self.progress.elapsed_s
        self.save()
        logger.info("budget used up at step %d", self.progress.step)
        if not self._log_file.has_evaluation(self.progress.step):
            self.evaluate()
        return True

    def request_stop(self) -> None:
        """Makes `train` end after the step that runs, with a checkpoint; from any thread."""
        self._is_stopping = True

    def step(self) -> tuple[Losses, float]:
        """Trains on one batch; returns its losses and the gradient's norm before clipping.

        A batch whose gradient is not finite changes no weight and counts as a step.
        """
        config = self._config
        self._set_learning_rate()
        window = self._sampler.batch(self.progress.step).to(self._device)
        losses = self._workers.backward(list(self.model.parameters()), self._losses, window)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.max_grad_norm)
        grad_norm = float(norm)
        if torch.isfinite(norm):
            self._optimizer.step()
        else:
            logger.warning("step %d: gradient is not finite, batch skipped", self.progress.step)
        self.progress.step += 1
        self.progress.num_tokens += mtp_loss.input_ids(window).numel()
        return losses, grad_norm

    def _set_learning_rate(self) -> None:
        """To that of the coming step."""
        config = self._config
        peak = config.optimizer.learning_rate
        set_learning_rate(self._optimizer, self.progress, config.schedule, peak)

    def evaluate(self) -> Evaluation:
        """Measures on the held-out windows and logs the result."""
        evaluation = evaluate(
            self.model,
            self._eval_windows,
            num_depths=self._config.loss.num_depths,
            bytes_per_token=self._bytes_per_token,
            batch_size=self._config.data.batch_size,
        )
        self._log("eval", **evaluation.to_dict())
        return evaluation

    def _evaluate_if_due(self) -> None:
        step = self.progress.step
        is_due = step > 0 and step % self._config.run.eval_every_steps == 0
        if is_due and not self._log_file.has_evaluation(step):
            self.evaluate()

    def save(self) -> None:
        """Writes a checkpoint and deletes those that are too many."""
        save_training_checkpoint(
            self._checkpoints, self.model, self._optimizer, self.progress, self._sampler.identity
        )
        delete_old_checkpoints(self._checkpoints, self._config.run.num_kept_checkpoints)

    def export(self, output_dir: Path) -> None:
        """Writes the weights as a checkpoint that engine and transformers load."""
        export_checkpoint(self.model, self._config.run.model_dir, output_dir)

    def _is_export_due(self) -> bool:
        """Whether the last step came to a multiple of `export_every_tokens`, or over it."""
        every = self._config.run.export_every_tokens
        return every is not None and self.progress.num_tokens % every < self._num_tokens_per_step

    def _steps(self) -> Iterator[tuple[Losses, float, float]]:
        """Losses, norm of the gradient and seconds of each step up to the end of the budget."""
        before_s = self.progress.elapsed_s
        start = time.monotonic()
        while self.progress.fraction(self._config.schedule) < 1.0:
            mark = time.monotonic()
            losses, grad_norm = self.step()
            end = time.monotonic()
            # Evaluation and checkpoints use up the budget but are no part of the speed.
            self.progress.elapsed_s = before_s + end - start
            step_s = end - mark
            fraction = self.progress.fraction(self._config.schedule)
            for listener in self._listeners:
                listener.on_step(self.progress, fraction, self._num_tokens_per_step / step_s)
            yield losses, grad_norm, step_s

    def _losses(self, window: Tensor) -> Losses:
        loss = self._config.loss
        predictions = predict(
            self.model,
            window,
            loss.num_depths,
            detach_trunk=loss.detach_trunk,
            dense_attention=True,
            # With fewer than two blocks there is no choice to learn.
            want_index_losses=loss.index_weight > 0
            and self._config.data.sequence_length >= 2 * self.model.config.indexer_compress_ratio,
        )
        return joint_loss(predictions, window, loss, self.model.config.num_experts_per_tok)

    @property
    def _num_tokens_per_step(self) -> int:
        return self._config.data.batch_size * self._config.data.sequence_length

    def _log(self, kind: str, **values: Any) -> None:
        record = self._log_file.write(
            {
                "kind": kind,
                "step": self.progress.step,
                "num_tokens": self.progress.num_tokens,
                "elapsed_s": round(self.progress.elapsed_s, 1),
                "budget_used": self.progress.fraction(self._config.schedule),
                "learning_rate": self._optimizer.param_groups[0]["lr"],
                **values,
            }
        )
        for listener in self._listeners:
            listener.on_record(record)
