"""Checkpoints of a run: weights, optimiser state, progress, in folders that appear whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from outrider.errors import OutriderError
from outrider.models.qwen4_exp.checkpoint_writer import flush_to_disk
from outrider.training.schedule import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor, nn

_MODEL_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_PROGRESS_FILE = "progress.json"
_PREFIX = "step-"
# What AdamW keeps for each parameter.
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save_training_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> Path:
    """Writes `folder/step-00001234` by way of a temporary folder that is renamed when complete.

    A crash or a full disk in between leaves the earlier checkpoints as they were.

    Raises:
        OutriderError: the files could not be written.
    """
    target = folder / f"{_PREFIX}{progress.step:08d}"
    temporary = folder / f".{target.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(_contiguous(model.state_dict()), temporary / _MODEL_FILE)
        save_file(_optimizer_tensors(model, optimizer), temporary / _OPTIMIZER_FILE)
        (temporary / _PROGRESS_FILE).write_text(json.dumps(asdict(progress)), encoding="utf-8")
        for path in temporary.iterdir():
            flush_to_disk(path)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        flush_to_disk(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OutriderError(
            f"{target}: the checkpoint could not be written ({error.strerror or error}); "
            "earlier ones are untouched"
        ) from error
    return target


def load_training_checkpoint(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Progress:
    """Restores weights and optimiser in place and returns the progress."""
    try:
        progress = Progress(**json.loads((checkpoint / _PROGRESS_FILE).read_text(encoding="utf-8")))
        model.load_state_dict(load_file(checkpoint / _MODEL_FILE), strict=True)
        tensors = load_file(checkpoint / _OPTIMIZER_FILE)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise OutriderError(f"{checkpoint}: not a checkpoint of this run ({error})") from error
    for name, parameter in model.named_parameters():
        if f"exp_avg.{name}" in tensors:
            # `step` stays on the CPU unless the optimiser is fused on the parameter's device.
            optimizer.state[parameter] = {
                moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS
            }
    return progress


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the complete checkpoint with the highest step, or None."""
    return max(folder.glob(f"{_PREFIX}*"), default=None)


def delete_old_checkpoints(folder: Path, num_kept: int) -> None:
    """Deletes all but the newest `num_kept`."""
    for checkpoint in sorted(folder.glob(f"{_PREFIX}*"))[:-num_kept]:
        shutil.rmtree(checkpoint)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
        tensors.update(
            {f"{moment}.{name}": state[moment] for moment in _MOMENTS if moment in state}
        )
    return _contiguous(tensors)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
