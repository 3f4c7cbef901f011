"""Writes a trained model as a checkpoint folder that the engine and transformers load."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.weights import save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

# Beside tokenizer.json a model need not have them.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


def export_checkpoint(model: Qwen4ExpForCausalLM, model_dir: Path, output_dir: Path) -> None:
    """Writes weights in bfloat16 and config.json, and copies the tokenizer.

    Args:
        model: trained, any float dtype; not changed.
        model_dir: where the tokenizer's files are.
        output_dir: made if missing; files of the same names are replaced.

    Raises:
        CheckpointError: a file could not be written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        # A run may go on in the folder that its tokenizer comes from.
        is_there = output_dir.samefile(model_dir)
        for name in _TOKENIZER_FILES:
            if (model_dir / name).exists() and not is_there:
                shutil.copyfile(model_dir / name, output_dir / name)
    except OSError as error:
        raise CheckpointError(
            f"{output_dir}: the checkpoint could not be written: {error.strerror or error}"
        ) from error
    # Last, since a folder with a config.json is a whole checkpoint.
    save_checkpoint(model, model.config, output_dir, dtype=torch.bfloat16)
