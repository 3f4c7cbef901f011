"""Configuration of a Qwen4-Exp checkpoint: the text trunk and its MTP head.

Field names are those of `config.json`. Everything is read once, checked once, and frozen; a key
that is not known is an error, because a field that is silently lost changes the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from outrider.errors import CheckpointError, shown
from outrider.json_file import read_json_object
from outrider.models.qwen4_exp import config_file
from outrider.ops.ngram_hash import setup as ngram_hash_setup

if TYPE_CHECKING:
    from collections.abc import Mapping

LINEAR_ATTENTION = "linear_attention"
INDEXED_ATTENTION = "indexed_attention"
# Three names of the same sparse attention, met in checkpoints of different origin.
_LAYER_TYPE_NAMES = {
    LINEAR_ATTENTION: LINEAR_ATTENTION,
    INDEXED_ATTENTION: INDEXED_ATTENTION,
    "full_attention": INDEXED_ATTENTION,
    "qwen_sparse_attention": INDEXED_ATTENTION,
}
_OUTPUT_GATES = ("sigmoid", "silu")
_INDEXER_FIELDS = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
# Fields that may be 0. The indexer's are 0 in a checkpoint without a sparse layer.
_MAY_BE_ZERO = {
    *_INDEXER_FIELDS,
    "ple_embed_dim",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "mtp_num_hidden_layers",
    "seed",
}
# Bounds far above any real model: a damaged file must not make us allocate or count for hours.
_MAX_LAYERS = 4096
_MAX_NGRAM_HEADS = 4096
_MAX_INT = 1 << 40


@dataclass(frozen=True)
class Qwen4ExpConfig:
    """The text model, with transformers' names and defaults.

    `layer_types` is normalised to "linear_attention" and "indexed_attention". `ple_layer_ids`
    counts layers from ONE, as the file does; `ple_layer_indices` counts from 0. A `ple_embed_dim`
    of 0 stands for hidden_size and is replaced by it. `eos_token_id` is the first id of the file's
    list (the n-gram hash uses it), `eos_token_ids` the whole list.
    """

    vocab_size: int = 248320
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    layer_types: tuple[str, ...] = ()
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    output_gate_type: str | None = None

    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.001

    hc_count: int = 4
    hc_lowrank: int = 320

    ple_layer_ids: tuple[int, ...] = ()
    ple_embed_dim: int = 0
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 512
    seed: int = 1234

    indexer_n_heads: int = 0
    indexer_kv_heads: int = 0
    indexer_head_dim: int = 0
    indexer_budget: int = 0
    indexer_compress_ratio: int = 0

    mtp_num_hidden_layers: int = 0
    index_share_for_mtp_iteration: bool = False

    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Normalise the aliases, then check every field and how they fit together."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                value = tuple(value)
            elif field.type == "float" and type(value) is int and abs(value) <= _MAX_INT:
                value = float(value)
            object.__setattr__(self, field.name, value)
            _check_type(field.name, str(field.type), value)
        self._check_ranges()
        self._normalise()
        self._check_attention()
        self._check_moe_and_streams()
        self._check_indexer()
        self._check_tokens()
        self._check_ple()

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], source: str = config_file.CONFIG_NAME
    ) -> Qwen4ExpConfig:
        """Read the parsed `config.json` of a text-only or a multimodal checkpoint.

        Args:
            config: the file's whole dict, or its `text_config`.
            source: name of the file, put before each error message.
        """
        try:
            known = tuple(field.name for field in fields(cls))
            return cls(**config_file.text_fields(config, known))
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> Qwen4ExpConfig:
        """Read `config.json` of a checkpoint directory."""
        path = config_file.find(Path(model_dir))
        return cls.from_dict(read_json_object(path), source=str(path))

    def to_hf_dict(self) -> dict[str, Any]:
        """The `config.json` of a text-only checkpoint, as transformers reads it."""
        values: dict[str, Any] = {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            for value in [getattr(self, field.name)]
        }
        for name in _INDEXER_FIELDS:
            values[name] = values[name] or None
        eos = values.pop("eos_token_ids")
        values["eos_token_id"] = eos if len(eos) > 1 else self.eos_token_id
        values["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": values.pop("rope_theta"),
            "partial_rotary_factor": values.pop("partial_rotary_factor"),
        }
        if not self.mtp_num_hidden_layers:
            # transformers has no such fields: leave them out where they say nothing.
            del values["mtp_num_hidden_layers"], values["index_share_for_mtp_iteration"]
        return {
            "architectures": ["Qwen4ExpForCausalLM"],
            "model_type": config_file.TEXT_MODEL_TYPE,
            **values,
        }

    @property
    def stream_width(self) -> int:
        """W: width of the residual, hc_count streams side by side."""
        return self.hc_count * self.hidden_size

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_index_blocks(self) -> int:
        """Complete key blocks that a query may select; 0 without a sparse layer."""
        if not self.indexer_compress_ratio:
            return 0
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def index_dense_limit(self) -> int:
        """Visible positions up to which every key is selected: all blocks, and a full tail."""
        return (self.num_index_blocks + 1) * self.indexer_compress_ratio - 1

    @property
    def output_gate(self) -> str:
        """Activation of the delta net's output gate: "sigmoid" or "silu"."""
        return self.output_gate_type or self.hidden_act

    @property
    def linear_key_dim(self) -> int:
        """Width of all key heads of a delta net."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Width of all value heads of a delta net."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_dim(self) -> int:
        """Channels of a delta net's convolution: q, then k, then v."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def linear_layer_indices(self) -> tuple[int, ...]:
        """0-based indices of the delta-net layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR_ATTENTION)

    @property
    def indexed_layer_indices(self) -> tuple[int, ...]:
        """0-based indices of the sparse-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == INDEXED_ATTENTION)

    @property
    def ple_layer_indices(self) -> tuple[int, ...]:
        """0-based indices of the layers with n-gram embeddings, ascending."""
        return tuple(layer_id - 1 for layer_id in self.ple_layer_ids)

    @property
    def num_ngram_heads(self) -> int:
        """Hashed heads of one PLE layer, over all n-gram orders."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_head_dim(self) -> int:
        """Width of one row of the n-gram table."""
        return self.ple_embed_dim // self.num_ngram_heads

    def ngram_head_vocab_sizes(self, ple_index: int) -> tuple[int, ...]:
        """Rows of each hashed head; `ple_index` is the rank among the PLE layers, from 0."""
        return ngram_hash_setup.head_vocab_sizes(
            self.ngram_vocab_size_base, self.num_ngram_heads, ple_index
        )

    def ngram_head_offsets(self, ple_index: int) -> tuple[int, ...]:
        """First table row of each hashed head."""
        return ngram_hash_setup.head_offsets(self.ngram_head_vocab_sizes(ple_index))

    def ngram_multipliers(self, ple_index: int) -> tuple[int, ...]:
        """Multiplier of each token of the n-gram, the newest token first."""
        return ngram_hash_setup.layer_multipliers(
            self.vocab_size, self.ngram_size, ple_index, self.seed
        )

    def ngram_table_rows(self, ple_index: int) -> int:
        """Rows of the joint table, padding included."""
        return ngram_hash_setup.padded_table_rows(
            self.ngram_head_vocab_sizes(ple_index), self.make_ngram_vocab_size_divisible_by
        )

    def _check_ranges(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int:
                least = 0 if field.name in _MAY_BE_ZERO else 1
                if field.name != "seed" and not least <= value <= _MAX_INT:
                    _fail(f"{field.name} must be {least} or more, got {value}")
            elif type(value) is float and not (math.isfinite(value) and value >= 0):
                _fail(f"{field.name} must be a finite number, 0 or more, got {value}")
        for name in ("num_hidden_layers", "mtp_num_hidden_layers"):
            if getattr(self, name) > _MAX_LAYERS:
                _fail(f"{name} must be at most {_MAX_LAYERS}, got {getattr(self, name)}")

    def _normalise(self) -> None:
        names = self.layer_types or config_file.interval_layer_types(
            self.num_hidden_layers, config_file.DEFAULT_ATTENTION_INTERVAL
        )
        unknown = sorted(set(names) - set(_LAYER_TYPE_NAMES))
        if unknown:
            known = ", ".join(_LAYER_TYPE_NAMES)
            _fail(f"layer_types: unknown {shown(unknown[0])}; known are {known}")
        if len(names) != self.num_hidden_layers:
            _fail(
                f"layer_types has {len(names)} entries for num_hidden_layers "
                f"{self.num_hidden_layers}"
            )
        normalised = tuple(_LAYER_TYPE_NAMES[name] for name in names)
        object.__setattr__(self, "layer_types", normalised)
        object.__setattr__(self, "ple_layer_ids", tuple(sorted(set(self.ple_layer_ids))))
        if not self.ple_embed_dim:
            object.__setattr__(self, "ple_embed_dim", self.hidden_size)

    def _check_attention(self) -> None:
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                _fail(
                    f"{many} must be a multiple of {few}, got {getattr(self, many)} and "
                    f"{getattr(self, few)}"
                )
        if not 0 < self.partial_rotary_factor <= 1:
            _fail(f"partial_rotary_factor must be in (0, 1], got {self.partial_rotary_factor}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            _fail(
                f"head_dim * partial_rotary_factor must be an even number of rotated dimensions, "
                f"got {self.head_dim} * {self.partial_rotary_factor} = {self.rotary_dim}"
            )
        if self.rope_theta <= 0:
            _fail(f"rope_theta must be greater than 0, got {self.rope_theta}")
        if self.hidden_act != "silu":
            _fail(f'hidden_act must be "silu", got {shown(self.hidden_act)}')
        if self.output_gate not in _OUTPUT_GATES:
            _fail(
                f"output_gate_type must be {' or '.join(_OUTPUT_GATES)}, "
                f"got {shown(self.output_gate_type)}"
            )

    def _check_moe_and_streams(self) -> None:
        if self.hc_count <= 1:
            _fail(f"hc_count must be greater than 1, got {self.hc_count}")
        if self.num_experts_per_tok > self.num_experts:
            _fail(
                f"num_experts_per_tok must be at most num_experts, got {self.num_experts_per_tok} "
                f"and {self.num_experts}"
            )

    def _check_indexer(self) -> None:
        values = {name: getattr(self, name) for name in _INDEXER_FIELDS}
        is_needed = INDEXED_ATTENTION in self.layer_types or self.mtp_num_hidden_layers > 0
        if not is_needed and not any(values.values()):
            return
        for name, value in values.items():
            if not value:
                _fail(f"{name} is missing: the sparse-attention layers need all indexer_* fields")
        if self.indexer_kv_heads != 1:
            _fail(f"indexer_kv_heads must be 1, got {self.indexer_kv_heads}")
        if self.indexer_budget % self.indexer_compress_ratio:
            _fail(
                f"indexer_budget must be a multiple of indexer_compress_ratio, got "
                f"{self.indexer_budget} and {self.indexer_compress_ratio}"
            )
        if self.rotary_dim > self.indexer_head_dim:
            _fail(
                f"indexer_head_dim must be at least the {self.rotary_dim} rotated dimensions "
                f"(head_dim * partial_rotary_factor), got {self.indexer_head_dim}"
            )

    def _check_tokens(self) -> None:
        ids = self.eos_token_ids
        if not ids and self.eos_token_id is not None:
            ids = (self.eos_token_id,)
        if ids and self.eos_token_id is None:
            object.__setattr__(self, "eos_token_id", ids[0])
        if ids and self.eos_token_id != ids[0]:
            _fail("eos_token_id must be the first of eos_token_ids")
        object.__setattr__(self, "eos_token_ids", ids)
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                _fail(f"eos_token_id must be in [0, {self.vocab_size}), got {token_id}")

    def _check_ple(self) -> None:
        if not self.ple_layer_ids:
            return
        for layer_id in self.ple_layer_ids:
            if not 1 <= layer_id <= self.num_hidden_layers:
                _fail(
                    f"ple_layer_ids counts layers from 1 to {self.num_hidden_layers}, "
                    f"got {layer_id}"
                )
            if self.layer_types[layer_id - 1] != LINEAR_ATTENTION:
                _fail(f"ple_layer_ids: layer {layer_id} must be a {LINEAR_ATTENTION} layer")
        if self.eos_token_id is None:
            _fail("eos_token_id must be set where ple_layer_ids is: the n-gram hash needs it")
        heads = self.num_ngram_heads
        if not 0 < heads <= _MAX_NGRAM_HEADS:
            _fail(
                f"(ngram_size - 1) * heads_per_ngram must be in [1, {_MAX_NGRAM_HEADS}], "
                f"got {heads}"
            )
        if self.ple_embed_dim % heads:
            _fail(
                f"ple_embed_dim must be a multiple of the {heads} n-gram heads, "
                f"got {self.ple_embed_dim}"
            )


def _fail(message: str) -> NoReturn:
    raise CheckpointError(message)


def _check_type(name: str, annotation: str, value: object) -> None:
    """Refuse a value whose type is not exactly the annotated one (so a bool is no int)."""
    if annotation.endswith(" | None"):
        if value is None:
            return
        annotation = annotation.removesuffix(" | None")
    is_right = {
        "int": type(value) is int,
        "float": type(value) is float,
        "bool": type(value) is bool,
        "str": type(value) is str,
        "tuple[int, ...]": type(value) is tuple and all(type(item) is int for item in value),
        "tuple[str, ...]": type(value) is tuple and all(type(item) is str for item in value),
    }[annotation]
    if not is_right:
        shape = annotation.replace("tuple[", "list of ").replace(", ...]", "")
        _fail(f"{name} must be {shape}, got {shown(value)}")
