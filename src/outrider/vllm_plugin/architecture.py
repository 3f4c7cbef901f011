"""The configuration of the model that vLLM is about to run, in our own strict form."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache

from outrider.errors import ConfigError
from outrider.models.qwen4_exp.checkpoint_files import weights_file
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.config_file import CONFIG_NAME, TEXT_MODEL_TYPE
from outrider.models.qwen4_exp.weights import check_tensors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ROPE_FIELDS = ("rope_type", "rope_theta", "partial_rotary_factor")


def read_architecture(vllm_config: VllmConfig) -> Qwen4ExpConfig:
    """The checked configuration of the text model.

    vLLM has read the file by transformers, whose object also holds what our reader has no name for;
    the fields that the text model is made of are taken by name.

    Raises:
        CheckpointError: a field has a value that the model cannot be built with.
    """
    published = vllm_config.model_config.hf_text_config
    values: dict[str, Any] = {
        field.name: value
        for field in fields(Qwen4ExpConfig)
        if (value := getattr(published, field.name, None)) is not None
    }
    values["mtp"] = _nested_head(vllm_config.model_config.hf_config)
    # vLLM renames the type in the configuration of a draft model.
    values["model_type"] = TEXT_MODEL_TYPE
    rope = getattr(published, "rope_parameters", None) or {}
    values["rope_parameters"] = {name: rope[name] for name in _ROPE_FIELDS if name in rope}
    for name in ("rope_theta", "partial_rotary_factor"):
        values.pop(name, None)
    return Qwen4ExpConfig.from_dict(values, source=vllm_config.model_config.model)


def check_cache_dtypes(vllm_config: VllmConfig) -> None:
    """Refuses dtypes of caches that are not those which the layers keep.

    Raises:
        ConfigError: one is neither "auto" nor what is kept.
    """
    cache = vllm_config.cache_config
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    for name, given, kept in (
        ("kv_cache_dtype", cache.cache_dtype, dtype),
        ("mamba_cache_dtype", cache.mamba_cache_dtype, dtype),
        # Delta nets sum up in float32 whatever the model's dtype.
        ("mamba_ssm_cache_dtype", cache.mamba_ssm_cache_dtype, "float32"),
    ):
        if given not in ("auto", kept):
            raise ConfigError(f'{name} "{given}" is not built: "auto" keeps {kept} here')


def check_weights(vllm_config: VllmConfig, num_mtp_layers: int) -> None:
    """Refuses a checkpoint without one of the model's tensors, or with one of another shape.

    vLLM takes the parameters of its own matrices and embeddings for loaded, whether they are or
    not, and runs on what was in the memory.

    Args:
        vllm_config: of the model that loads.
        num_mtp_layers: of the head, where the head is what loads.

    Raises:
        CheckpointError: names the tensor.
    """
    folder = _checkpoint_folder(vllm_config.model_config)
    # Of other formats than safetensors nothing is known before they are read.
    if folder is not None and weights_file(folder).exists():
        check_tensors(folder, read_architecture(vllm_config), num_mtp_layers)


def _checkpoint_folder(model_config: Any) -> Path | None:
    """Where the files lie that vLLM has found or fetched; None where that is not known."""
    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    found = try_to_load_from_cache(
        model_config.model, CONFIG_NAME, revision=model_config.revision or "main"
    )
    return Path(found).parent if isinstance(found, str) else None


def num_head_layers(hf_config: Any) -> int:
    """Layers of the head that a file describes, 0 without one.

    Args:
        hf_config: of the whole file, by transformers.
    """
    count = getattr(hf_config.get_text_config(), "mtp_num_hidden_layers", None)
    nested = _nested_head(hf_config)
    if count is None and isinstance(nested, dict):
        count = nested.get("num_hidden_layers")
    return count or 0


def _nested_head(hf_config: Any) -> Any:
    """What the file says of the head in an object of its own, beside or in the text model's."""
    found = getattr(hf_config.get_text_config(), "mtp", None)
    return getattr(hf_config, "mtp", None) if found is None else found
