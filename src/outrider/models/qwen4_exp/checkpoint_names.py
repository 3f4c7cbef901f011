"""Which parameter of the model each tensor of a checkpoint fills, and which part of it.

Checkpoints of the same model differ in prefixes, in experts packed or one by one, and in the parts
of the n-gram table. All differences end here: the result is a list of pieces that cover every
parameter exactly once, or an error that names the tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from outrider.models.qwen4_exp.checkpoint_files import StoredTensor

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
MTP_PREFIX = "mtp."
HASH_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")

# As written -> as the text-only class names it. The first match counts.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.mtp.", "mtp."),
    ("mtp.", "mtp."),
    ("model.", "model."),
    ("lm_head.", "lm_head."),
)
_VISION_PREFIXES = ("model.visual.", "visual.")
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_ONE_EXPERT = re.compile(rf"(.+\.mlp\.experts)\.{_NUMBER}\.(gate|up|down)_proj\.weight")
_NGRAM_SHARD = re.compile(rf"(.+\.ngram_embedding)\.shard_{_NUMBER}\.weight")
_SHARED_HEAD = re.compile(r"mtp\.(.+\.)?shared_head\.head\.weight")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_QUANTISED_NAME = re.compile(
    r".+[._](weight_scale(_inv)?|weight_packed|weight_shape|weight_zero_point|input_scale"
    r"|qweight|qzeros|scales|g_idx)"
)


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the part of a parameter that it fills.

    Attributes:
        source: the stored tensor.
        target: name of the parameter.
        region: slices into the parameter, one per leading dimension; () is all of it.
    """

    source: StoredTensor
    target: str
    region: tuple[int | slice, ...] = ()


@dataclass
class LoadPlan:
    """What to read and where it goes.

    Attributes:
        pieces: cover every parameter exactly once.
        copies: tensors that repeat a parameter (a tied or shared lm_head) and must equal it.
        hash_buffers: the stored integers of each buffer of the n-gram hash, by its name.
        num_vision_tensors: tensors of the vision tower, which is not built.
        num_mtp_tensors_skipped: tensors of the MTP head, where it is not wanted.
    """

    pieces: list[Piece] = field(default_factory=list)
    copies: list[Piece] = field(default_factory=list)
    hash_buffers: dict[str, StoredTensor] = field(default_factory=dict)
    num_vision_tensors: int = 0
    num_mtp_tensors_skipped: int = 0


def canonical_name(name: str) -> str | None:
    """Name in the text-only layout; None for a tensor of the vision tower."""
    if name.startswith(_VISION_PREFIXES):
        return None
    for written, canonical in _PREFIXES:
        if name.startswith(written):
            return canonical + name.removeprefix(written)
    return name


def is_mtp_tensor(name: str) -> bool:
    """Whether a stored tensor belongs to the MTP head (a repeated lm_head does not)."""
    canonical = canonical_name(name)
    return (
        canonical is not None
        and canonical.startswith(MTP_PREFIX)
        and not _SHARED_HEAD.fullmatch(canonical)
    )


def no_head_error(where: Path) -> CheckpointError:
    """What asking for drafts gets where there is no MTP head.

    Args:
        where: the file that would name its tensors.
    """
    return CheckpointError(
        f'{where}: the checkpoint has no mtp.* tensors, so it cannot draft with method "mtp"; '
        "leave out speculative_config for plain decoding"
    )


def make_load_plan(
    stored: Iterable[StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    buffers: Mapping[str, tuple[int, ...]],
    where: Path,
) -> LoadPlan:
    """Assign every stored tensor to a parameter.

    Args:
        stored: all tensors of the checkpoint.
        shapes: shape of each parameter of the model; without an `mtp.` name the head is skipped,
            without an `lm_head.weight` it is tied to the embedding.
        buffers: shape of each hash buffer of the model.
        where: file to name when a tensor is missing.
    """
    return _Planner(shapes, buffers, where).plan(stored)


class _Planner:
    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        buffers: Mapping[str, tuple[int, ...]],
        where: Path,
    ) -> None:
        self.shapes = shapes
        self.buffers = buffers
        self.where = where
        self.has_head = any(name.startswith(MTP_PREFIX) for name in shapes)
        self.result = LoadPlan()
        self.seen: dict[str, StoredTensor] = {}
        # How this checkpoint writes each prefix, so that a missing tensor is named as it would be.
        self.written_prefixes: dict[str, str] = {}
        self.whole: dict[str, StoredTensor] = {}
        self.experts: defaultdict[str, dict[tuple[int, str], StoredTensor]] = defaultdict(dict)
        self.shards: defaultdict[str, dict[int, StoredTensor]] = defaultdict(dict)

    def plan(self, stored: Iterable[StoredTensor]) -> LoadPlan:
        for tensor in stored:
            name = canonical_name(tensor.name)
            if name is None:
                self.result.num_vision_tensors += 1
                continue
            _refuse_quantised(tensor)
            if name in self.seen:
                raise CheckpointError(
                    f"{tensor.path}: {tensor.name} is stored twice, the other is "
                    f"{self.seen[name].name} in {self.seen[name].path.name}"
                )
            self.seen[name] = tensor
            rest = name.split(".", 1)[1] if "." in name else name
            self.written_prefixes.setdefault(
                name.removesuffix(rest), tensor.name.removesuffix(rest)
            )
            self._assign(name, tensor)
        if self.has_head and not any(map(is_mtp_tensor, self.seen)):
            raise no_head_error(self.where)
        self._collect()
        return self.result

    def _assign(self, name: str, tensor: StoredTensor) -> None:
        if name in self.buffers:
            _check(tensor, self.buffers[name], ("I64",))
            self.result.hash_buffers[name] = tensor
            return
        if name in self.shapes:
            _check(tensor, self.shapes[name])
            self.whole[name] = tensor
            return
        if name == LM_HEAD or _SHARED_HEAD.fullmatch(name):
            target = LM_HEAD if LM_HEAD in self.shapes else EMBEDDING
            _check(tensor, self.shapes[target])
            self.result.copies.append(Piece(tensor, target))
            return
        if name.startswith(MTP_PREFIX) and not self.has_head:
            self.result.num_mtp_tensors_skipped += 1
            return
        if self._assign_part(name, tensor):
            return
        raise CheckpointError(
            f"{tensor.path}: unexpected tensor {tensor.name}; "
            "the model that config.json describes has none of that name"
        )

    def _assign_part(self, name: str, tensor: StoredTensor) -> bool:
        """Take an expert or a part of an n-gram table; False if the tensor is neither."""
        if match := _ONE_EXPERT.fullmatch(name):
            layer, expert, kind = match[1], int(match[2]), match[3]
            target = f"{layer}.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
            shape = self.shapes.get(target)
            if shape is None or expert >= shape[0]:
                return False
            rows = shape[1] if kind == "down" else shape[1] // 2
            _check(tensor, (rows, shape[2]))
            self.experts[target][expert, kind] = tensor
            return True
        if match := _NGRAM_SHARD.fullmatch(name):
            target = f"{match[1]}.weight"
            shape = self.shapes.get(target)
            if shape is None:
                return False
            _check(tensor, (*tensor.shape[:1], *shape[1:]))
            self.shards[target][int(match[2])] = tensor
            return True
        return False

    def _collect(self) -> None:
        missing: list[str] = []
        for target in self.shapes:
            whole = self.whole.get(target)
            parts = [*self.experts[target].values(), *self.shards[target].values()]
            if whole is None and not parts:
                missing += self._take_copy(target)
            elif whole is None:
                missing += self._collect_parts(target)
            elif parts:
                raise CheckpointError(
                    f"{parts[0].path}: {parts[0].name} is stored twice, the other is in "
                    f"{whole.name} in {whole.path.name}"
                )
            else:
                self.result.pieces.append(Piece(whole, target))
        missing += [name for name in self.buffers if name not in self.result.hash_buffers]
        if missing:
            rest = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{self.where}: tensor {self._as_written(missing[0])} is missing{rest}"
            )

    def _take_copy(self, target: str) -> list[str]:
        """Fill lm_head from a repeated one where it is not stored under its own name."""
        for piece in self.result.copies:
            if piece.target == target:
                self.result.copies.remove(piece)
                self.result.pieces.append(piece)
                return []
        return [target]

    def _collect_parts(self, target: str) -> list[str]:
        """Add the pieces of a divided parameter; return the names of the parts not there."""
        shape = self.shapes[target]
        if experts := self.experts[target]:
            half = shape[1] // 2
            regions: dict[str, tuple[slice, ...]] = {
                "gate": (slice(half),),
                "up": (slice(half, None),),
            }
            if target.endswith("down_proj"):
                regions = {"down": ()}
            layer = target.rpartition(".")[0]
            missing = []
            for expert in range(shape[0]):
                for kind, rows in regions.items():
                    if tensor := experts.get((expert, kind)):
                        self.result.pieces.append(Piece(tensor, target, (expert, *rows)))
                    else:
                        missing.append(f"{layer}.{expert}.{kind}_proj.weight")
            return missing
        return self._collect_shards(target, shape[0])

    def _collect_shards(self, target: str, num_rows: int) -> list[str]:
        shards = self.shards[target]
        stem = target.removesuffix(".weight")
        missing = [f"{stem}.shard_{i}.weight" for i in range(max(shards)) if i not in shards]
        if missing:
            return missing
        row = 0
        # Numeric order: as text, shard_10 would come before shard_2.
        for index in sorted(shards):
            tensor = shards[index]
            if row + tensor.shape[0] > num_rows:
                raise CheckpointError(
                    f"{tensor.path}: {tensor.name} has shape {list(tensor.shape)}: shards 0 to "
                    f"{index} hold {row + tensor.shape[0]} rows, the table {num_rows}"
                )
            self.result.pieces.append(Piece(tensor, target, (slice(row, row + tensor.shape[0]),)))
            row += tensor.shape[0]
        return [] if row == num_rows else [f"{stem}.shard_{len(shards)}.weight"]

    def _as_written(self, name: str) -> str:
        prefix, dot, rest = name.partition(".")
        written = self.written_prefixes.get(prefix + dot, prefix + dot)
        return written + rest


def _refuse_quantised(tensor: StoredTensor) -> None:
    is_quantised = _QUANTISED_NAME.fullmatch(tensor.name) or tensor.dtype.startswith(
        ("F8_", "F6_", "F4", "I8", "U8")
    )
    if is_quantised:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} ({tensor.dtype}) belongs to a quantised checkpoint, "
            "which is not supported; use the bfloat16 release"
        )


def _check(
    tensor: StoredTensor, shape: tuple[int, ...], dtypes: tuple[str, ...] = _FLOAT_DTYPES
) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has shape {list(tensor.shape)}, expected {list(shape)}"
        )
    if tensor.dtype not in dtypes:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has dtype {tensor.dtype}, expected {' or '.join(dtypes)}"
        )
