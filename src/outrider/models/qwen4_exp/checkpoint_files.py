"""The safetensors files of a checkpoint: which there are, and which tensors they hold.

Every header is checked here before any library maps the file, so a truncated download or a file
made to do harm ends as one line that names it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from outrider.errors import CheckpointError, shown
from outrider.json_file import read_json_object

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# Bits of each dtype of the safetensors format.
_DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_LENGTH_BYTES = 8
# The limit of the reference implementation.
_MAX_HEADER_BYTES = 100_000_000
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_MAX_NAME_LENGTH = 512
_MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a header describes it.

    Attributes:
        name: name in the file.
        path: the file that holds it.
        dtype: safetensors' name of the dtype, such as "BF16".
        shape: its dimensions.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * _DTYPE_BITS[self.dtype] // 8


def list_tensors(model_dir: Path) -> list[StoredTensor]:
    """Every tensor of a checkpoint, from the headers alone.

    A single `model.safetensors` is preferred to an index, as in transformers.
    """
    single, index = model_dir / WEIGHTS_NAME, model_dir / INDEX_NAME
    try:
        if not model_dir.is_dir():
            raise CheckpointError(f"{model_dir}: no such checkpoint directory")
        is_single = single.exists() or single.is_symlink()
        if not (is_single or index.exists() or index.is_symlink()):
            raise CheckpointError(f"{model_dir}: {_what_is_missing(model_dir)}")
    except OSError as error:
        # No permission, or a path that is too long.
        raise CheckpointError(f"{model_dir}: cannot be read: {error.strerror}") from None
    return read_header(single) if is_single else _list_sharded(index)


def weights_file(model_dir: Path) -> Path:
    """The file that says which tensors there are: the weights themselves, or their index."""
    single = model_dir / WEIGHTS_NAME
    return single if single.exists() else model_dir / INDEX_NAME


def read_header(path: Path) -> list[StoredTensor]:
    """Tensors of one safetensors file; the header is checked against the size of the file."""
    if not path.is_file():
        raise CheckpointError(f"{path}: missing or no regular file; is the download complete?")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
                raise CheckpointError(
                    f"{path}: truncated: {size} bytes do not hold its header; download it again"
                )
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: header of {length} bytes is over the {_MAX_HEADER_BYTES} allowed"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return _check_header(path, _parse_header(path, text), size - _LENGTH_BYTES - length)


def _what_is_missing(model_dir: Path) -> str:
    if next(model_dir.glob("model-*-of-*.safetensors"), None):
        return f"{INDEX_NAME} is missing, but shards are there; is the download complete?"
    if next(model_dir.glob("*.bin"), None):
        return f"{WEIGHTS_NAME} is missing; only safetensors is read, convert the *.bin files"
    return f"neither {WEIGHTS_NAME} nor {INDEX_NAME} is there"


def _list_sharded(index: Path) -> list[StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map must be an object that names each tensor's file"
        )
    shards: list[str] = []
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_file_name(shard):
            raise CheckpointError(
                f"{index}: {shown(tensor)} lies in {shown(shard)}, which is no plain "
                "*.safetensors file name"
            )
        shards.append(shard)
    shards = sorted(set(shards))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent / missing[0]}: missing ({len(missing)} of {len(shards)} shards are); "
            "is the download complete?"
        )
    tensors: list[StoredTensor] = []
    for shard in shards:
        for tensor in read_header(index.parent / shard):
            listed = weight_map.get(tensor.name)
            if listed != shard:
                where = "not listed" if listed is None else f"listed in {listed}"
                raise CheckpointError(f"{tensor.path}: {tensor.name} is {where} in {index.name}")
            tensors.append(tensor)
    absent = sorted(set(weight_map) - {tensor.name for tensor in tensors})
    if absent:
        shard = weight_map[absent[0]]
        raise CheckpointError(
            f"{index.parent / shard}: tensor {shown(absent[0])} is not in this file"
        )
    return tensors


def _is_plain_file_name(name: str) -> bool:
    # The length is that of a name which a file can have.
    return re.fullmatch(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,200}\.safetensors", name) is not None


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: the header names {twice!r} twice")
        return result

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: the header is no valid JSON; download it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header must be a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: the header's __metadata__ must map strings to strings")
    return header


def _check_header(path: Path, header: dict[str, Any], data_bytes: int) -> list[StoredTensor]:
    """Check each entry, and that the tensors fill the data of the file without hole or overlap."""
    tensors: list[StoredTensor] = []
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if len(name) > _MAX_NAME_LENGTH or not _TENSOR_NAME.fullmatch(name):
            raise CheckpointError(f"{path}: {name[:80]!r} is no valid tensor name")
        tensor, begin, end = _check_entry(path, name, entry)
        tensors.append(tensor)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: truncated: {name} ends at byte {end} of {data_bytes}; download it again"
            )
        if begin != position:
            raise CheckpointError(
                f"{path}: {name} starts at byte {begin}, expected {position}: "
                "tensors overlap or leave a hole"
            )
        position = end
    if position != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - position} bytes belong to no tensor")
    return tensors


def _check_entry(path: Path, name: str, entry: object) -> tuple[StoredTensor, int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{path}: the entry of {name} must have exactly dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise CheckpointError(f"{path}: {name} has the unknown dtype {dtype!r}")
    if not _is_size_list(shape) or not _is_size_list(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: shape and data_offsets of {name} must be lists of sizes, "
            f"got {str(shape)[:80]} and {str(offsets)[:80]}"
        )
    tensor = StoredTensor(name, path, dtype, tuple(shape))
    begin, end = offsets
    if prod(shape) * _DTYPE_BITS[dtype] != (end - begin) * 8:
        raise CheckpointError(
            f"{path}: {name} spans {end - begin} bytes, but {dtype} {shape} needs "
            f"{tensor.num_bytes}"
        )
    return tensor, begin, end


def _is_size_list(value: object) -> bool:
    # The bounds keep products small; no real dimension or number of them comes near.
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(item) is int and 0 <= item < 1 << 48 for item in value)
    )
