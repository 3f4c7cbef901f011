"""What a checkpoint's `generation_config.json` asks for: sampling defaults and where text ends.

As in vLLM, its sampling fields are the defaults of requests that give no parameters, and its
end-of-sequence ids stop every request that does not ignore them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError, RequestError, shown
from outrider.json_file import read_json_object
from outrider.sampling_params import SamplingParams

GENERATION_CONFIG_NAME = "generation_config.json"

# Their names in the file, and in SamplingParams.
_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class GenerationConfig:
    """The fields of the file that have an effect.

    Attributes:
        eos_token_ids: ids that end an output; empty where the file names none.
        sampling_params: the defaults of a request without parameters.
        max_new_tokens: what the file says of the output's length; None where it says nothing.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> GenerationConfig:
        """Read the file of a checkpoint directory; without one nothing is asked for."""
        path = Path(model_dir) / GENERATION_CONFIG_NAME
        if not path.exists():
            return cls()
        values = read_json_object(path)
        params = _sampling_params(path, values)
        max_new_tokens = None if values.get("max_new_tokens") is None else params.max_tokens
        return cls(_eos_token_ids(path, values.get("eos_token_id")), params, max_new_tokens)


def _eos_token_ids(path: Path, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(
            f"{path}: eos_token_id must be a token id or a list of them, got {shown(value)}"
        )
    return tuple(dict.fromkeys(ids))


def _sampling_params(path: Path, values: dict[str, Any]) -> SamplingParams:
    given = {
        name: values[key] for key, name in _SAMPLING_FIELDS.items() if values.get(key) is not None
    }
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from None
