"""The configuration of the model that vLLM is about to run, in our own strict form."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.config_file import TEXT_MODEL_TYPE

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
    # vLLM renames the type in the configuration of a draft model.
    values["model_type"] = TEXT_MODEL_TYPE
    rope = getattr(published, "rope_parameters", None) or {}
    values["rope_parameters"] = {name: rope[name] for name in _ROPE_FIELDS if name in rope}
    for name in ("rope_theta", "partial_rotary_factor"):
        values.pop(name, None)
    return Qwen4ExpConfig.from_dict(values, source=vllm_config.model_config.model)
