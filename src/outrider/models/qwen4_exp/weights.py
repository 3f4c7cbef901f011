"""Weights of a checkpoint, streamed from safetensors into a model.

Every tensor of trunk and head is loaded exactly once. Parameters are NaN before, and none may be
after: a tensor that were forgotten here would otherwise decode fluent nonsense.
"""

from __future__ import annotations

import logging
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.available_memory import available_memory
from outrider.models.qwen4_exp.checkpoint_files import list_tensors, weights_file
from outrider.models.qwen4_exp.checkpoint_names import (
    HASH_BUFFERS,
    MTP_PREFIX,
    LoadPlan,
    Piece,
    is_mtp_tensor,
    make_load_plan,
    no_head_error,
)
from outrider.models.qwen4_exp.checkpoint_writer import save_checkpoint
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["check_tensors", "has_mtp", "load_model", "load_weights", "save_checkpoint"]

logger = logging.getLogger(__name__)

_BINARY_UNITS = (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30))
# Exponents and sums of the delta rule: never below float32, whatever the engine's dtype.
_FLOAT32_PARAMETERS = ("A_log", "dt_bias")


def has_mtp(model_dir: str | Path) -> bool:
    """Whether a checkpoint carries tensors of an MTP head, from its headers alone."""
    return any(is_mtp_tensor(tensor.name) for tensor in list_tensors(Path(model_dir)))


def load_model(
    model_dir: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    want_mtp: bool | None = None,
    max_positions: int | None = None,
) -> Qwen4ExpForCausalLM:
    """Build the model that `config.json` describes and load its weights.

    Args:
        model_dir: the checkpoint's directory.
        device: where the model lives.
        dtype: of all parameters; weights are cast once, here.
        want_mtp: build the MTP head (an error where there is none); None builds it where there is.
        max_positions: rows of the rotary table, at most the configuration's limit; None is the
            limit.

    Raises:
        CheckpointError: the checkpoint is damaged, of another architecture, or too large.
    """
    config = Qwen4ExpConfig.from_pretrained(model_dir)
    is_there = has_mtp(model_dir)
    if want_mtp is None:
        want_mtp = is_there
    if want_mtp and not is_there:
        raise no_head_error(weights_file(Path(model_dir)))
    if want_mtp and not config.mtp_num_hidden_layers:
        raise CheckpointError(
            f"{Path(model_dir) / 'config.json'}: mtp_num_hidden_layers is missing or 0, "
            "but the checkpoint has mtp.* tensors"
        )
    num_mtp_layers = config.mtp_num_hidden_layers if want_mtp else 0
    limit = config.max_position_embeddings
    max_positions = limit if max_positions is None else min(max_positions, limit)
    try:
        with torch.device("meta"):
            module = Qwen4ExpForCausalLM(config, num_mtp_layers, max_positions)
    except RuntimeError as error:
        # Sizes whose product is beyond 64 bits.
        raise CheckpointError(f"{Path(model_dir) / 'config.json'}: {error}") from None
    _check_rotary_table(model_dir, max_positions, config.rotary_dim, torch.device(device), dtype)
    load_weights(module, config, model_dir, device=device, dtype=dtype, want_mtp=want_mtp)
    module.build_tables()
    return module.eval()


def load_weights(
    module: nn.Module,
    config: Qwen4ExpConfig,
    model_dir: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    want_mtp: bool,
) -> None:
    """Load every parameter of a module, and check its hash buffers.

    Args:
        module: its parameters have the names of the text-only checkpoint, experts packed; they may
            lie on "meta" and are replaced by parameters on `device`.
        config: what the module was built from.
        model_dir: the checkpoint's directory.
        device: where the parameters go.
        dtype: of the parameters; the decay parameters of the delta nets stay float32 or better.
        want_mtp: whether the module's MTP head is to be loaded; without it the checkpoint's is
            skipped.
    """
    model_dir, device = Path(model_dir), torch.device(device)
    shapes = _shapes(module)
    module_has_mtp = any(name.startswith(MTP_PREFIX) for name in shapes)
    assert module_has_mtp == want_mtp, "the module must be built with an MTP head iff it is wanted"
    buffers = _hash_buffers(module, config)
    plan = _load_plan(model_dir, shapes, buffers)
    _check_memory(model_dir, shapes, device, dtype)
    _log_skipped(model_dir, plan)
    parameters = _replace_parameters(module, device, dtype)
    with torch.no_grad():
        for piece, tensor in _read(plan.pieces):
            parameters[piece.target][piece.region].copy_(tensor)
        _check_no_nan(model_dir, plan, parameters)
        for piece, tensor in _read(plan.copies):
            target = parameters[piece.target]
            if not torch.equal(tensor.to(target.device, target.dtype), target):
                raise CheckpointError(
                    f"{piece.source.path}: {piece.source.name} differs from {piece.target}, "
                    "which it must repeat"
                )
    _set_hash_buffers(module, plan, buffers, device)


def check_tensors(model_dir: str | Path, config: Qwen4ExpConfig, num_mtp_layers: int) -> None:
    """Check that a checkpoint has every tensor of a model and no other, from its headers alone.

    For whoever loads them by other means.

    Args:
        model_dir: the checkpoint's directory.
        config: of the model.
        num_mtp_layers: of the head; with 0 the checkpoint's may be there or not.

    Raises:
        CheckpointError: names the tensor.
    """
    with torch.device("meta"):
        module = Qwen4ExpForCausalLM(config, num_mtp_layers, max_positions=1)
    _load_plan(Path(model_dir), _shapes(module), _hash_buffers(module, config))


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _load_plan(
    model_dir: Path, shapes: dict[str, tuple[int, ...]], buffers: dict[str, Tensor]
) -> LoadPlan:
    return make_load_plan(
        list_tensors(model_dir),
        shapes,
        {name: tuple(value.shape) for name, value in buffers.items()},
        weights_file(model_dir),
    )


def _hash_buffers(module: nn.Module, config: Qwen4ExpConfig) -> dict[str, Tensor]:
    """The integers each hash buffer of the module must hold, by its name, int64 on the CPU."""
    result = {}
    names = {name for name, _ in module.named_buffers()}
    for ple_index, layer in enumerate(config.ple_layer_indices):
        numbers = (
            config.ngram_multipliers(ple_index),
            config.ngram_head_vocab_sizes(ple_index),
            config.ngram_head_offsets(ple_index),
        )
        for leaf, values in zip(HASH_BUFFERS, numbers, strict=True):
            name = f"model.layers.{layer}.ple.ple_embedding.{leaf}"
            assert name in names, f"the module has no buffer {name}"
            result[name] = torch.tensor(values, dtype=torch.int64)
    return result


def _check_memory(
    model_dir: Path,
    shapes: dict[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Refuse a checkpoint that does not fit, before anything is allocated."""
    num_bytes = sum(
        torch.Size(shape).numel() * _parameter_dtype(name, dtype).itemsize
        for name, shape in shapes.items()
    )
    available = available_memory(device)
    if available is not None and num_bytes > available:
        raise CheckpointError(
            f"{model_dir}: its weights need {_readable(num_bytes)} in "
            f"{str(dtype).removeprefix('torch.')}, but {_readable(available)} are available "
            f"on {device}"
        )


def _check_rotary_table(
    model_dir: str | Path,
    max_positions: int,
    rotary_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Refuse more positions than there is memory for their angles."""
    num_bytes = max_positions * rotary_dim * dtype.itemsize
    available = available_memory(device)
    if available is not None and num_bytes > available:
        raise CheckpointError(
            f"{model_dir}: the angles of {max_positions} positions need {_readable(num_bytes)}, "
            f"but {_readable(available)} are available on {device}: lower max_model_len"
        )


def _readable(num_bytes: int) -> str:
    unit = next((unit for unit in _BINARY_UNITS if num_bytes < 1024 * unit[1]), _BINARY_UNITS[-1])
    return f"{num_bytes / unit[1]:.1f} {unit[0]}"


def _log_skipped(model_dir: Path, plan: LoadPlan) -> None:
    if plan.num_vision_tensors:
        logger.info("%s: skipped %d vision tensors", model_dir, plan.num_vision_tensors)
    if plan.num_mtp_tensors_skipped:
        logger.info(
            "%s: skipped %d tensors of the unused MTP head", model_dir, plan.num_mtp_tensors_skipped
        )


def _parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if name.endswith(_FLOAT32_PARAMETERS) and dtype.itemsize < torch.float32.itemsize:
        return torch.float32
    return dtype


def _replace_parameters(
    module: nn.Module, device: torch.device, dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Give the module new parameters full of NaN; tied ones stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    by_name: dict[str, nn.Parameter] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        if old not in replaced:
            value = torch.full(
                old.shape, torch.nan, dtype=_parameter_dtype(name, dtype), device=device
            )
            replaced[old] = nn.Parameter(value, requires_grad=old.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, replaced[old])
        by_name[name] = replaced[old]
    return by_name


def _read(pieces: list[Piece]) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece with its tensor, file by file; a tensor is mapped, not copied, on the CPU."""
    ordered = sorted(pieces, key=lambda piece: str(piece.source.path))
    for path, group in groupby(ordered, key=lambda piece: piece.source.path):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for piece in group:
                    yield piece, file.get_tensor(piece.source.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None


def _check_no_nan(model_dir: Path, plan: LoadPlan, parameters: dict[str, nn.Parameter]) -> None:
    """Every parameter was overwritten, and with numbers."""
    broken = {name for name, value in parameters.items() if _has_nan(value)}
    for piece in plan.pieces:
        if piece.target in broken and _has_nan(parameters[piece.target][piece.region]):
            raise CheckpointError(f"{piece.source.path}: {piece.source.name} holds a NaN")
    assert not broken, f"{model_dir}: {sorted(broken)} were not loaded"


def _has_nan(value: Tensor) -> bool:
    # The least value is NaN if any is, and needs no mask as large as a table of n-grams.
    return value.numel() > 0 and bool(value.amin().isnan())


def _set_hash_buffers(
    module: nn.Module, plan: LoadPlan, buffers: dict[str, Tensor], device: torch.device
) -> None:
    """Set the computed integers, after comparing them with those stored."""
    stored = [Piece(tensor, name) for name, tensor in plan.hash_buffers.items()]
    for piece, tensor in _read(stored):
        expected = buffers[piece.target]
        if not torch.equal(tensor, expected):
            raise CheckpointError(
                f"{piece.source.path}: {piece.source.name} is {tensor.tolist()}, but config.json "
                f"gives {expected.tolist()}: vocab_size, seed or an n-gram field differs"
            )
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, value.to(device))
