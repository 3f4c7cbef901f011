"""Checkpoints of a run: weights, optimiser state, progress, in folders that appear whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.errors import OutriderError
from outrider.models.qwen4_exp.checkpoint_writer import flush_to_disk, give_ordinary_permissions
from outrider.training.schedule import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor, nn

CHECKPOINTS_FOLDER = "checkpoints"  # of a run's output folder
_MODEL_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_PROGRESS_FILE = "progress.json"
_DATA = "data"  # its key for what the steps read
_PREFIX = "step-"
_UNFINISHED = ".tmp"
# What AdamW keeps for each parameter.
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save_training_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    data: Mapping[str, int | str],
) -> Path:
    """Writes `folder/step-00001234` by way of a temporary folder that is renamed when complete.

    A crash or a full disk in between leaves the earlier checkpoints as they were. A checkpoint of
    this step that is there already is kept: a step always leads to the same weights.

    Args:
        folder: of the run's checkpoints.
        model: its weights.
        optimizer: its state.
        progress: how far the run has come.
        data: what decides which windows a step reads (`WindowSampler.identity`).

    Raises:
        OutriderError: the files could not be written.
    """
    target = folder / f"{_PREFIX}{progress.step:08d}"
    if target.exists():
        return target
    temporary = folder / f".{target.name}{_UNFINISHED}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(_weights(model), temporary / _MODEL_FILE)
        save_file(_optimizer_tensors(model, optimizer), temporary / _OPTIMIZER_FILE)
        record = {**asdict(progress), _DATA: dict(data)}
        (temporary / _PROGRESS_FILE).write_text(json.dumps(record), encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            give_ordinary_permissions(path)
            flush_to_disk(path)
        temporary.rename(target)
        flush_to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OutriderError(
            f"{target}: the checkpoint could not be written "
            f"({getattr(error, 'strerror', None) or error}); earlier ones are untouched"
        ) from error
    return target


def load_training_checkpoint(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Mapping[str, int | str],
) -> Progress:
    """Restores weights and optimiser in place and returns the progress.

    Raises:
        OutriderError: a file is missing or damaged, or the checkpoint is of another model or was
            trained on other windows.
    """
    try:
        record = json.loads((checkpoint / _PROGRESS_FILE).read_text(encoding="utf-8"))
        data_before = dict(record.pop(_DATA))
        progress = Progress(**record)
        weights = load_file(checkpoint / _MODEL_FILE)
        tensors = load_file(checkpoint / _OPTIMIZER_FILE)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise OutriderError(f"{checkpoint}: not a checkpoint of this run ({error})") from error
    _check_data(checkpoint, data_before, data)
    _check_names_and_shapes(checkpoint, weights, _weights(model))
    # What is left out is tied to what is there.
    model.load_state_dict(weights, strict=False)
    for name, parameter in model.named_parameters():
        if f"exp_avg.{name}" in tensors:
            # `step` stays on the CPU unless the optimiser is fused on the parameter's device.
            optimizer.state[parameter] = {
                moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS
            }
    return progress


def _check_data(
    checkpoint: Path, before: Mapping[str, int | str], now: Mapping[str, int | str]
) -> None:
    for name, value in now.items():
        if before.get(name) != value:
            raise OutriderError(
                f"{checkpoint}: the run has read other windows so far ({name} was "
                f"{before.get(name)}, is {value}): go on as before, or name another "
                "run.output_dir, with run.init_from if it is to start from these weights"
            )


def _check_names_and_shapes(
    checkpoint: Path, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    for name in sorted(weights.keys() | expected.keys()):
        there, wanted = (
            tuple(tensors[name].shape) if name in tensors else None
            for tensors in (weights, expected)
        )
        if there != wanted:
            raise OutriderError(
                f"{checkpoint}: not a checkpoint of this run ({name} is "
                f"{there or 'missing'}, the model has {wanted or 'none of that name'}); "
                "name another run.output_dir, or delete it"
            )


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the complete checkpoint with the highest step, or None."""
    return max(folder.glob(f"{_PREFIX}*"), default=None)


def delete_old_checkpoints(folder: Path, num_kept: int) -> None:
    """Deletes all but the newest `num_kept`, and what a crash left half written or half deleted."""
    for checkpoint in sorted(folder.glob(f"{_PREFIX}*"))[:-num_kept]:
        # Under its own name there is only ever a whole checkpoint.
        checkpoint.rename(folder / f".{checkpoint.name}{_UNFINISHED}")
    for unfinished in folder.glob(f".{_PREFIX}*{_UNFINISHED}"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
        tensors.update(
            {f"{moment}.{name}": state[moment] for moment in _MOMENTS if moment in state}
        )
    return _contiguous(tensors)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor once: of those that are tied, the first."""
    tensors = model.state_dict()
    places: set[int] = set()
    for name, tensor in list(tensors.items()):
        if tensor.numel() and tensor.data_ptr() in places:
            del tensors[name]
        places.add(tensor.data_ptr())
    return _contiguous(tensors)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
