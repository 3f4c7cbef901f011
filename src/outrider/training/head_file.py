"""The MTP head of a checkpoint as a file of its own: taken out, and put into a checkpoint.

A head that was tuned reaches the engine this way, with the trunk's bytes as they were.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.checkpoint_files import (
    INDEX_NAME,
    WEIGHTS_NAME,
    StoredTensor,
    list_tensors,
    read_header,
    weights_file,
)
from outrider.models.qwen4_exp.checkpoint_names import (
    MTP_PREFIX,
    is_mtp_tensor,
    make_load_plan,
    no_head_error,
)
from outrider.models.qwen4_exp.checkpoint_writer import flush_to_disk, give_ordinary_permissions
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.config_file import CONFIG_NAME
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

# The head's file within a checkpoint of several files.
_HEAD_SHARD = "mtp.safetensors"
# What a checkpoint consists of beside its weights: configuration, tokenizer, chat template, terms.
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_COPIED_NAMES = ("LICENSE", "NOTICE")
_METADATA = {"format": "pt"}
# Narrower ones first.
_FLOAT_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def save_head(
    model: Qwen4ExpForCausalLM, head_file: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes a model's `mtp.*` parameters, experts packed.

    Args:
        model: with an MTP head, any float dtype; not changed.
        head_file: the safetensors file to write; it appears whole or not at all.
        dtype: of the stored weights.

    Raises:
        CheckpointError: the file could not be written.
    """
    if model.mtp is None:
        raise ValueError("the model has no MTP head to save")
    tensors = {
        f"{MTP_PREFIX}{name}": parameter.detach().to("cpu", dtype).contiguous()
        for name, parameter in model.mtp.named_parameters()
    }
    _write_head(tensors, head_file)


def extract_head(model_dir: Path, head_file: Path) -> int:
    """Copies the `mtp.*` tensors of a checkpoint, bit for bit, and returns how many there are.

    A repeated lm_head of the head is the trunk's and stays behind.

    Args:
        model_dir: the checkpoint; one file or several.
        head_file: the safetensors file to write; it appears whole or not at all.

    Raises:
        CheckpointError: the checkpoint has no head, is damaged, or the file could not be written.
    """
    stored = [tensor for tensor in list_tensors(model_dir) if is_mtp_tensor(tensor.name)]
    if not stored:
        raise CheckpointError(
            f"{weights_file(model_dir)}: no mtp.* tensors, so there is no head to take out"
        )
    _write_head(_read(stored), head_file)
    return len(stored)


def stitch_head(model_dir: Path, head_file: Path, output_dir: Path) -> None:
    """Writes a copy of a checkpoint with another head; all other tensors keep their bytes.

    Args:
        model_dir: the checkpoint, with a head that is replaced or with none.
        head_file: a safetensors file of `mtp.*` tensors that fit the checkpoint's config.json:
            each parameter of the head exactly once, in its shape, in whatever float dtype.
        output_dir: missing or empty. A missing one appears whole or not at all; into an empty one
            the files come at the end, config.json as the last.

    Raises:
        CheckpointError: the head does not fit, the folder is not empty, or a file could not be
            read or written.
    """
    head = read_header(head_file)
    _check_head(model_dir, head_file, head)
    try:
        check_new_folder(output_dir)
        place = output_dir if output_dir.is_dir() else output_dir.parent
        place.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.", dir=place))
        try:
            _copy_other_files(model_dir, staging)
            _write_weights(model_dir, head, staging)
            for path in (*staging.iterdir(), staging):
                give_ordinary_permissions(path)
                flush_to_disk(path)
            _publish(staging, output_dir)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{output_dir}: the checkpoint could not be written: {_reason(error)}"
        ) from None


def check_new_folder(folder: Path) -> None:
    """Raises a CheckpointError unless the folder is missing or empty, and can be written.

    Nothing stays of what is written to find that out.
    """
    try:
        # A link that leads nowhere is something, too.
        is_taken = os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None
    if is_taken:
        raise CheckpointError(f"{folder}: exists and is not empty; name a new folder")
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        Path(tempfile.mkdtemp(dir=place)).rmdir()
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from None


def head_dtype(model_dir: Path) -> torch.dtype:
    """The widest float dtype that a checkpoint stores its head in."""
    stored = {tensor.dtype for tensor in list_tensors(model_dir) if is_mtp_tensor(tensor.name)}
    floats = [dtype for name, dtype in _FLOAT_DTYPES.items() if name in stored]
    if not floats:
        raise no_head_error(weights_file(model_dir))
    return floats[-1]


def check_same_trunk(first_dir: Path, second_dir: Path) -> int:
    """Compares all tensors of two checkpoints but the heads', bit for bit, name by name.

    Returns:
        How many tensors were compared.

    Raises:
        CheckpointError: one differs, or only one of the checkpoints has it; it is named.
    """
    first, second = (
        {tensor.name: tensor for tensor in list_tensors(folder) if not is_mtp_tensor(tensor.name)}
        for folder in (first_dir, second_dir)
    )
    for name in first.keys() ^ second.keys():
        absent = second_dir if name in first else first_dir
        raise CheckpointError(f"{absent}: has no tensor {name}, which the other checkpoint has")
    for name, tensor in first.items():
        one, other = _read([tensor])[name], _read([second[name]])[name]
        if one.dtype != other.dtype or not torch.equal(_bytes(one), _bytes(other)):
            raise CheckpointError(f"{second[name].path}: {name} differs from that in {tensor.path}")
    return len(first)


def _check_head(model_dir: Path, head_file: Path, head: list[StoredTensor]) -> None:
    """Names and shapes, by the plan that a loader would follow."""
    config = Qwen4ExpConfig.from_pretrained(model_dir)
    num_layers = config.mtp_num_hidden_layers
    if not num_layers:
        raise CheckpointError(
            f"{model_dir / 'config.json'}: mtp_num_hidden_layers is missing or 0, so the model has "
            "no place for a head"
        )
    for tensor in head:
        if not is_mtp_tensor(tensor.name):
            raise CheckpointError(f"{head_file}: {tensor.name} belongs to no MTP head")
    if not head:
        raise no_head_error(head_file)
    with torch.device("meta"):
        model = Qwen4ExpForCausalLM(config, num_layers, max_positions=1)
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name.startswith(MTP_PREFIX)
    }
    make_load_plan(head, shapes, {}, head_file)


def _copy_other_files(model_dir: Path, folder: Path) -> None:
    for path in sorted(model_dir.iterdir()):
        is_copied = path.suffix in _COPIED_SUFFIXES or path.name in _COPIED_NAMES
        if is_copied and path.name != INDEX_NAME and path.is_file():
            shutil.copyfile(path, folder / path.name)


def _write_weights(model_dir: Path, head: list[StoredTensor], folder: Path) -> None:
    """The files of the weights: one as one, several as several with the head in one more."""
    stored = list_tensors(model_dir)
    is_sharded = weights_file(model_dir).name == INDEX_NAME
    kept: dict[str, list[StoredTensor]] = {}
    for tensor in stored:
        if not is_mtp_tensor(tensor.name):
            kept.setdefault(tensor.path.name, []).append(tensor)
    kept.setdefault(_HEAD_SHARD if is_sharded else WEIGHTS_NAME, []).extend(head)
    for name, tensors in kept.items():
        path = model_dir / name
        if tensors == [tensor for tensor in stored if tensor.path == path]:
            shutil.copyfile(path, folder / name)
        else:
            save_file(_read(tensors), folder / name, metadata=_metadata(path))
    if is_sharded:
        index = {
            "metadata": {
                "total_size": sum(tensor.num_bytes for group in kept.values() for tensor in group)
            },
            "weight_map": {
                tensor.name: name for name, tensors in kept.items() for tensor in tensors
            },
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _publish(staging: Path, output_dir: Path) -> None:
    """Moves complete files to where they are looked for."""
    if not output_dir.exists():
        staging.rename(output_dir)
        flush_to_disk(output_dir.parent)
        return
    # Not the folder itself: a mount cannot be replaced, and a shell in it would see none of them.
    for path in sorted(staging.iterdir(), key=lambda path: path.name == CONFIG_NAME):
        path.rename(output_dir / path.name)
    flush_to_disk(output_dir)


def _write_head(tensors: dict[str, Tensor], head_file: Path) -> None:
    temporary = head_file.with_name(f".{head_file.name}.tmp")
    try:
        head_file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata=_METADATA)
        give_ordinary_permissions(temporary)
        flush_to_disk(temporary)
        temporary.replace(head_file)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{head_file}: the head could not be written: {_reason(error)}"
        ) from None


def _read(stored: Iterable[StoredTensor]) -> dict[str, Tensor]:
    """The tensors by name, each file opened once; they are mapped, not copied."""
    by_path: dict[Path, list[str]] = {}
    for tensor in stored:
        by_path.setdefault(tensor.path, []).append(tensor.name)
    tensors = {}
    for path, names in by_path.items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors.update({name: file.get_tensor(name) for name in names})
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
    return tensors


def _metadata(path: Path) -> dict[str, str]:
    if not path.exists():
        return _METADATA
    with safe_open(path, framework="pt") as file:
        return file.metadata() or _METADATA


def _bytes(tensor: Tensor) -> Tensor:
    # Bits, since a NaN equals nothing.
    return tensor.reshape(-1).view(torch.uint8)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
