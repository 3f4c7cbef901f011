"""One training run from its configuration: corpus, model, loop, export.

Run again with the same file, it goes on from the newest checkpoint in the output folder.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from typing import TYPE_CHECKING

import torch

from outrider.device import default_device, is_device_name, is_present
from outrider.errors import ConfigError
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.models.qwen4_exp.weights import has_mtp, load_weights
from outrider.training.checkpoint import CHECKPOINTS_FOLDER, latest_checkpoint
from outrider.training.corpus import (
    TokenArray,
    encode_documents,
    load_documents,
    load_tokenizer,
)
from outrider.training.loss_plot import LossPlot
from outrider.training.memory import keep_freed_memory
from outrider.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outrider.training.config import TrainConfig
    from outrider.training.trainer import TrainingListener

logger = logging.getLogger(__name__)

EXPORT_FOLDER = "export"
PLOT_FILE = "loss.png"
_PLOT_LIBRARY = "matplotlib"


def make_trainer(config: TrainConfig, listeners: Sequence[TrainingListener] = ()) -> Trainer:
    """Builds corpus and model, and takes up the newest checkpoint of the output folder, if any.

    Args:
        config: of the run.
        listeners: are told of its steps and records, beside the loss plot.

    Raises:
        OutriderError: a file or an option of the run is not what it should be.
    """
    device = _resolve_device(config.run.device)
    keep_freed_memory()
    model_config = Qwen4ExpConfig.from_pretrained(config.run.model_dir)
    config.data.check_sequence_length(model_config.ngram_size)
    if config.data.sequence_length > model_config.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} is above the model's "
            f"max_position_embeddings, {model_config.max_position_embeddings}"
        )
    if config.loss.num_depths and not model_config.mtp_num_hidden_layers:
        raise ConfigError(
            f"{config.run.model_dir / 'config.json'}: mtp_num_hidden_layers is missing or 0, so "
            "there is no head to train: set it to 1, or loss.mtp_weight to 0"
        )
    train_tokens, held_out_tokens = _load_tokens(config, model_config.vocab_size)
    model = build_model(config, model_config).to(device)
    model.build_tables()
    logger.info(
        "%s parameters on %s", f"{sum(value.numel() for value in model.parameters()):,}", device
    )
    listeners = list(listeners)
    if importlib.util.find_spec(_PLOT_LIBRARY) is None:
        logger.warning("no loss plot: %s is missing; pip install 'outrider[train]'", _PLOT_LIBRARY)
    else:
        listeners.insert(0, LossPlot(config.run.output_dir / PLOT_FILE))
    return Trainer(
        model,
        config,
        train_tokens=train_tokens,
        held_out_tokens=held_out_tokens,
        listeners=listeners,
    )


def run_to_the_end(trainer: Trainer, config: TrainConfig) -> Path | None:
    """Trains, and exports to `output_dir/export`.

    Returns:
        The folder of the export, or None where the trainer was asked to stop before.
    """
    if not trainer.train():
        return None
    export_dir = config.run.output_dir / EXPORT_FOLDER
    trainer.export(export_dir)
    return export_dir


def build_model(config: TrainConfig, model_config: Qwen4ExpConfig) -> Qwen4ExpForCausalLM:
    """Makes the model that a run starts with, on the CPU, in float32.

    Without a head to train it has none, and its trunk is the one that it would have beside a head.
    Where there is a checkpoint to go on from, `run.init_from` has done its part and is not read.

    Raises:
        CheckpointError: `run.init_from` is damaged or does not fit.
        ConfigError: `run.init_from` is of another configuration.
    """
    model = Qwen4ExpForCausalLM(model_config, num_mtp_layers=model_config.mtp_num_hidden_layers)
    model.init_weights(torch.Generator().manual_seed(config.run.seed))
    if not config.loss.num_depths:
        model.mtp = None
    has_begun = latest_checkpoint(config.run.output_dir / CHECKPOINTS_FOLDER) is not None
    if config.run.init_from is not None and not has_begun:
        _load_first_weights(model, model_config, config.run.init_from)
    return model


def _load_first_weights(
    model: Qwen4ExpForCausalLM, config: Qwen4ExpConfig, model_dir: Path
) -> None:
    other = Qwen4ExpConfig.from_pretrained(model_dir)
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(other, field.name)
        if ours != theirs:
            raise ConfigError(
                f"run.init_from: {model_dir / 'config.json'} has {field.name} {theirs}, the one in "
                f"run.model_dir {ours}; they must agree"
            )
    head = model.mtp
    has_head = has_mtp(model_dir)
    if not has_head:
        # Out of the loader's sight, it keeps its fresh weights.
        model.mtp = None
    load_weights(
        model,
        config,
        model_dir,
        device="cpu",
        dtype=torch.float32,
        want_mtp=model.mtp is not None,
    )
    model.mtp = head
    is_fresh = head is not None and not has_head
    logger.info("first weights: %s%s", model_dir, ", and a fresh head" if is_fresh else "")


def _load_tokens(config: TrainConfig, vocab_size: int) -> tuple[TokenArray, TokenArray]:
    """The texts to train on and those held out, encoded."""
    tokenizer = load_tokenizer(config.run.model_dir)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError(
            f"{config.run.model_dir}: tokenizer.json has {tokenizer.get_vocab_size()} entries, "
            f"but vocab_size in config.json is {vocab_size}"
        )
    train, held_out = (
        encode_documents(tokenizer, documents) for documents in load_documents(config.data)
    )
    for name, tokens in (("train", train), ("held out", held_out)):
        logger.info(
            "%s: %s documents, %s bytes, %s tokens",
            name,
            *(
                f"{number:,}"
                for number in (tokens.num_documents, tokens.num_bytes, len(tokens.token_ids))
            ),
        )
    return train, held_out


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device(default_device())
    if not is_device_name(name) or not is_present(name):
        raise ConfigError(
            f'run.device: {name!r} is no device of this machine; "auto" takes one that is, '
            f"{default_device()}"
        )
    return torch.device(name)
