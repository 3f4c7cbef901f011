"""Writes a trained model as a checkpoint folder that the engine and transformers load."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch

from outrider.models.qwen4_exp.weights import save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export_checkpoint(model: Qwen4ExpForCausalLM, model_dir: Path, output_dir: Path) -> None:
    """Writes weights in bfloat16 and config.json, and copies the tokenizer.

    Args:
        model: trained, any float dtype; not changed.
        model_dir: where the tokenizer's files are.
        output_dir: made if missing; files of the same names are replaced.
    """
    save_checkpoint(model, model.config, output_dir, dtype=torch.bfloat16)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(model_dir / name, output_dir / name)
