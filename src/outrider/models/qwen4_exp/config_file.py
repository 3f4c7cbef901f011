"""The file `config.json`: where its fields lie and which of its keys are known.

Two layouts exist: text-only, with the fields at the top, and multimodal, with the text model nested
under `text_config`. This module turns either into the keyword arguments of `Qwen4ExpConfig`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from outrider.errors import CheckpointError, shown

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_NAME = "config.json"
TEXT_MODEL_TYPE = "qwen4_exp_text"
MODEL_TYPE = "qwen4_exp"
DEFAULT_ATTENTION_INTERVAL = 4

# Keys that every transformers configuration may carry, or that only matter while training. None of
# them changes what the text model computes at inference.
_TOLERATED_KEYS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_experts_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "experts_implementation",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "mamba_ssm_dtype",
        "model_type",
        "name_or_path",
        "num_labels",
        "number_of_conv_states",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_MULTIMODAL_KEYS = frozenset(
    {
        "image_token_id",
        "language_model_only",
        "mtp",
        "partial_rotary_factor",
        "text_config",
        "tie_word_embeddings",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
        # Some writers repeat them beside text_config, where they are read.
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)
_ROPE_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        # On text the three position axes are equal, so how they interleave has no effect.
        "mrope_section",
        "mrope_interleaved",
    }
)
_NESTED_MTP_KEYS = frozenset(
    {
        "hybrid",
        "layer_types",
        "mtp_use_hidden_state_from_layer",
        "num_hidden_layers",
        "rope_theta",
    }
)
# Switches of features that no known checkpoint uses; the value given is the only one that is built.
_FIXED_VALUES: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mtp_use_dedicated_embeddings": (False,),
}


def find(model_dir: Path) -> Path:
    """Path of the configuration in a checkpoint directory; what is missing is named."""
    path = model_dir / CONFIG_NAME
    try:
        if not model_dir.is_dir():
            raise CheckpointError(f"{model_dir}: no such checkpoint directory")
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; a checkpoint directory holds {CONFIG_NAME}")
    except OSError as error:
        # No permission, or a path that is too long.
        raise CheckpointError(f"{model_dir}: cannot be read: {error.strerror}") from None
    return path


def interval_layer_types(num_layers: int, interval: int) -> tuple[str, ...]:
    """Layer types where the file gives none: every `interval`-th layer is sparse attention."""
    return tuple(
        "linear_attention" if (i + 1) % interval else "indexed_attention" for i in range(num_layers)
    )


def text_fields(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Keyword arguments of `Qwen4ExpConfig` from a parsed file of either layout.

    Args:
        config: the whole file, or its text_config.
        known: field names of `Qwen4ExpConfig`.
    """
    _refuse_other_architectures(config)
    if config.get("quantization_config") is not None:
        _refuse_quantised(config["quantization_config"])
    if "text_config" not in config:
        if config.get("model_type") == MODEL_TYPE:
            raise CheckpointError(f'text_config is missing (model_type "{MODEL_TYPE}" nests it)')
        return _flat_fields(config, known)
    text = config["text_config"]
    if not isinstance(text, Mapping):
        raise CheckpointError(f"text_config must be an object, got {shown(text)}")
    _refuse_unknown(config, _MULTIMODAL_KEYS | _TOLERATED_KEYS | {"quantization_config"}, "")
    if text.get("quantization_config") is not None:
        _refuse_quantised(text["quantization_config"])
    if text.get("model_type", TEXT_MODEL_TYPE) != TEXT_MODEL_TYPE:
        raise CheckpointError(
            f'text_config.model_type: expected "{TEXT_MODEL_TYPE}", got {shown(text["model_type"])}'
        )
    merged = dict(text)
    # The embedding and lm_head are tied or not by the class that owns lm_head, the outer one.
    if config.get("tie_word_embeddings") is not None:
        merged["tie_word_embeddings"] = config["tie_word_embeddings"]
    for key in ("partial_rotary_factor", "mtp"):
        if merged.get(key) is None:
            merged[key] = config.get(key)
    return _flat_fields(merged, known)


def _refuse_other_architectures(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in (MODEL_TYPE, TEXT_MODEL_TYPE):
        raise CheckpointError(
            f'model_type: expected "{MODEL_TYPE}" or "{TEXT_MODEL_TYPE}", got {shown(model_type)}'
        )
    architectures = config.get("architectures")
    if not architectures:
        return
    if not isinstance(architectures, list) or not str(architectures[0]).startswith("Qwen4Exp"):
        raise CheckpointError(
            f"architectures: expected Qwen4ExpForCausalLM or Qwen4ExpForConditionalGeneration, "
            f"got {shown(architectures)}"
        )


def _refuse_quantised(quantization: object) -> None:
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    raise CheckpointError(
        f"quantization_config: quantised checkpoints ({shown(method)}) are not supported; "
        "use the bfloat16 release"
    )


def _refuse_unknown(config: Mapping[str, Any], known: Iterable[str], prefix: str) -> None:
    names = sorted(known)
    for key in config:
        if key in names:
            continue
        near = difflib.get_close_matches(str(key), names, n=1)
        hint = f'; did you mean "{prefix}{near[0]}"?' if near else ""
        raise CheckpointError(f"unknown key {shown(prefix + str(key))}{hint}")


def _flat_fields(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Fields of a text configuration, aliases and nested dicts resolved."""
    special = {"rope_parameters", "rope_scaling", "mtp", "full_attention_interval"}
    accepted = {*known, *special, *_FIXED_VALUES, *_TOLERATED_KEYS, "quantization_config"}
    _refuse_unknown(config, accepted - {"eos_token_ids"}, "")
    for key, values in _FIXED_VALUES.items():
        if config.get(key) is not None and config[key] not in values:
            raise CheckpointError(f"{key} must be {shown(values[0])}, got {shown(config[key])}")
    # A null means "absent", as in transformers.
    result = {key: config[key] for key in known if config.get(key) is not None}
    result.update(_rope_fields(config))
    _merge_nested_mtp(config.get("mtp"), result)
    eos = result.get("eos_token_id")
    if isinstance(eos, list):
        del result["eos_token_id"]
        result["eos_token_ids"] = eos
    if "layer_types" not in result and config.get("full_attention_interval") is not None:
        interval, layers = config["full_attention_interval"], result.get("num_hidden_layers", 40)
        if type(interval) is not int or interval < 1:
            raise CheckpointError(
                f"full_attention_interval must be an int, 1 or more, got {shown(interval)}"
            )
        # A broken num_hidden_layers is reported by the config class.
        if type(layers) is int and 0 < layers <= 4096:
            result["layer_types"] = interval_layer_types(layers, interval)
    return result


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and partial_rotary_factor; those inside rope_parameters win.

    Of two objects transformers reads `rope_scaling` alone, in which a context is extended by hand.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if rope is None:
        rope = {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"rope_parameters must be an object, got {shown(rope)}")
    _refuse_unknown(rope, _ROPE_KEYS, "rope_parameters.")
    for key in ("rope_type", "type"):
        if rope.get(key, "default") != "default":
            raise CheckpointError(
                f'rope_parameters.{key} must be "default", got {shown(rope[key])}'
            )
    return {
        key: source[key]
        for key in ("rope_theta", "partial_rotary_factor")
        for source in (config, rope)
        if source.get(key) is not None
    }


def _merge_nested_mtp(mtp: object, result: dict[str, Any]) -> None:
    """Fold the nested `mtp` object into the flat fields; a contradiction is an error."""
    if mtp is None:
        return
    if not isinstance(mtp, Mapping):
        raise CheckpointError(f"mtp must be an object, got {shown(mtp)}")
    _refuse_unknown(mtp, _NESTED_MTP_KEYS, "mtp.")
    if mtp.get("mtp_use_hidden_state_from_layer") is not None:
        raise CheckpointError(
            "mtp.mtp_use_hidden_state_from_layer must be null (the head reads the last layer's "
            f"streams), got {shown(mtp['mtp_use_hidden_state_from_layer'])}"
        )
    kinds = mtp.get("layer_types") or ()
    if not isinstance(kinds, list | tuple):
        raise CheckpointError(f"mtp.layer_types must be a list, got {shown(kinds)}")
    for kind in kinds:
        if kind not in ("full_attention", "indexed_attention", "qwen_sparse_attention"):
            raise CheckpointError(f"mtp.layer_types: expected full_attention, got {shown(kind)}")
    for nested, flat in (("num_hidden_layers", "mtp_num_hidden_layers"), ("rope_theta",) * 2):
        value = mtp.get(nested)
        if value is None:
            continue
        if flat in result and result[flat] != value:
            raise CheckpointError(
                f"mtp.{nested} is {shown(value)} but {flat} is {shown(result[flat])}"
            )
        if flat == "rope_theta" and flat not in result and value != 10000.0:
            raise CheckpointError(
                f"mtp.rope_theta is {shown(value)} but rope_theta is absent (10000)"
            )
        result[flat] = value
