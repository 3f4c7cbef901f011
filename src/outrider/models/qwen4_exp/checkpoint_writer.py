"""Writes a model as a text-only checkpoint that transformers and this package both load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.checkpoint_files import INDEX_NAME, WEIGHTS_NAME
from outrider.models.qwen4_exp.config_file import CONFIG_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from outrider.models.qwen4_exp.config import Qwen4ExpConfig

Layout = Literal["packed", "per_expert"]


def save_checkpoint(
    module: nn.Module,
    config: Qwen4ExpConfig,
    out_dir: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = "packed",
    max_shard_bytes: int | None = None,
) -> None:
    """Write `config.json` and the weights, n-gram tables in `split_ngram_parts` parts.

    The files are complete before the first of them gets its name. A new directory appears whole; in
    one that exists, other files are left alone and older weights are replaced.

    Args:
        module: parameters named as in the text-only checkpoint, experts packed.
        config: its configuration.
        out_dir: directory to write.
        dtype: of the stored weights.
        layout: experts as two tensors a layer, or three tensors an expert.
        max_shard_bytes: size above which the weights are divided into files with an index; a
            single larger tensor gets a file of its own. None writes one file.
    """
    out_dir = Path(out_dir)
    shards = _divide(list(_named_tensors(module, config, layout)), dtype, max_shard_bytes)
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        try:
            _write_files(staging, shards, config, dtype)
            _publish(staging, out_dir)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{out_dir}: the checkpoint could not be written: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from None


def _named_tensors(
    module: nn.Module, config: Qwen4ExpConfig, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """Stored names and views of the module's tensors; a tied lm_head is left out."""
    persistent = module.state_dict().keys()
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        if name.endswith("ngram_embedding.weight"):
            stem = name.removesuffix(".weight")
            for index, part in enumerate(value.chunk(config.split_ngram_parts)):
                yield f"{stem}.shard_{index}.weight", part
        elif layout == "per_expert" and name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            for expert, gate_up in enumerate(value):
                gate, up = gate_up.chunk(2)
                yield f"{stem}.{expert}.gate_proj.weight", gate
                yield f"{stem}.{expert}.up_proj.weight", up
        elif layout == "per_expert" and name.endswith(".experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            for expert, down in enumerate(value):
                yield f"{stem}.{expert}.down_proj.weight", down
        else:
            yield name, value
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def _divide(
    tensors: list[tuple[str, Tensor]], dtype: torch.dtype, max_shard_bytes: int | None
) -> list[dict[str, Tensor]]:
    """Group the tensors, in order, into files of at most `max_shard_bytes`."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        num_bytes = _num_stored_bytes(tensor, dtype)
        if shards[-1] and max_shard_bytes is not None and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    return shards


def _num_stored_bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    stored = dtype if tensor.is_floating_point() else tensor.dtype
    return prod(tensor.shape) * stored.itemsize


def _write_files(
    folder: Path, shards: list[dict[str, Tensor]], config: Qwen4ExpConfig, dtype: torch.dtype
) -> None:
    """One file a shard, cast to the stored dtype one file at a time."""
    names = [WEIGHTS_NAME]
    if len(shards) > 1:
        names = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
        index = {
            "metadata": {
                "total_size": sum(
                    _num_stored_bytes(tensor, dtype)
                    for shard in shards
                    for tensor in shard.values()
                )
            },
            "weight_map": {
                tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
            },
        }
        _write_json(folder / INDEX_NAME, index)
    for name, shard in zip(names, shards, strict=True):
        stored = {
            tensor: value.to(
                "cpu", dtype if value.is_floating_point() else value.dtype
            ).contiguous()
            for tensor, value in shard.items()
        }
        # transformers refuses a file whose metadata does not name the framework.
        save_file(stored, folder / name, metadata={"format": "pt"})
    _write_json(
        folder / CONFIG_NAME,
        {**config.to_hf_dict(), "dtype": str(dtype).removeprefix("torch.")},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _publish(staging: Path, out_dir: Path) -> None:
    """Move complete files to where they are looked for."""
    for path in staging.iterdir():
        give_ordinary_permissions(path)
        flush_to_disk(path)
    if not out_dir.exists():
        give_ordinary_permissions(staging)
        staging.rename(out_dir)
        flush_to_disk(out_dir.parent)
        return
    new = {path.name for path in staging.iterdir()}
    for path in sorted(staging.iterdir(), key=lambda path: path.name == CONFIG_NAME):
        path.replace(out_dir / path.name)
    for path in (
        *out_dir.glob("model-*-of-*.safetensors"),
        out_dir / INDEX_NAME,
        out_dir / WEIGHTS_NAME,
    ):
        if path.name not in new:
            path.unlink(missing_ok=True)
    flush_to_disk(out_dir)


def give_ordinary_permissions(path: Path) -> None:
    """Gives a file or folder the permissions of any other new one.

    What was written under a temporary name is private, in safetensors as well.
    """
    umask = os.umask(0)
    os.umask(umask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def flush_to_disk(path: Path) -> None:
    """Waits until a file or folder is on the disk.

    A rename must not become durable before the data it publishes.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
