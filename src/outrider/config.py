"""Options of the engine: one frozen tree, with vLLM's names, in which an unknown key is an error.

"auto" is resolved once, by `EngineConfig.resolve`, into a new object. torch is imported where a
device or dtype is looked at and not before: the command line and `import outrider` start at once.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, get_args

from outrider.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

RejectionSampleMethod = Literal["standard", "block", "coupled"]
DraftSampleMethod = Literal["probabilistic", "greedy"]
DType = Literal["auto", "float32", "float64"]

REJECTION_SAMPLE_METHODS: tuple[str, ...] = get_args(RejectionSampleMethod)
MAX_SPECULATIVE_TOKENS = 8
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1

# Options of vLLM that this build knows in one state only: asking for that state is no error.
_FIXED_OPTIONS: dict[str, tuple[object, ...]] = {
    "async_scheduling": (False,),
    "compilation_config": (None,),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "enable_chunked_prefill": (True,),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "enable_prefix_caching": (False,),
    "enforce_eager": (True,),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto", "safetensors"),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "tensor_parallel_size": (1,),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (False,),
}
_FIXED_SPECULATIVE_OPTIONS: dict[str, tuple[object, ...]] = {
    "draft_tensor_parallel_size": (1,),
    "enforce_eager": (True,),
    "model": (None,),
    "quantization": (None,),
}
_ALIASES = {"kv_cache_memory_bytes": "kv_cache_memory"}
# vLLM's options that have no counterpart, with what to write.
_REFUSED_OPTIONS = {
    "gpu_memory_utilization": "give the bytes for the caches as kv_cache_memory",
    "swap_space": "there is no swapping; give the bytes for the caches as kv_cache_memory",
}
# Line breaks become spaces one for one, so that columns stay.
_ONE_LINE = str.maketrans("\n\r\t", "   ")
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and judged: the object given as `speculative_config`.

    Attributes:
        method: "mtp", the checkpoint's own multi-token-prediction head.
        num_speculative_tokens: drafts asked for per step, 1 to 8.
        draft_sample_method: "probabilistic" samples drafts under the request's own parameters,
            "greedy" takes the likeliest token as a one-hot proposal.
        rejection_sample_method: rule at temperature > 0; None leaves the choice to
            `EngineConfig.rejection_sample_method`.
        index_share_for_mtp_iteration: whether the draft steps of one iteration share one choice of
            key blocks; None leaves it to the checkpoint.
    """

    method: Literal["mtp"] = "mtp"
    num_speculative_tokens: int = 3
    draft_sample_method: DraftSampleMethod = "probabilistic"
    rejection_sample_method: RejectionSampleMethod | None = None
    index_share_for_mtp_iteration: bool | None = None

    def __post_init__(self) -> None:
        """Check each field."""
        where = "speculative_config."
        _check_method(self.method)
        _check_int(
            f"{where}num_speculative_tokens",
            self.num_speculative_tokens,
            1,
            MAX_SPECULATIVE_TOKENS,
            "leave speculative_config out for plain decoding",
        )
        _check_choice(
            f"{where}draft_sample_method", self.draft_sample_method, get_args(DraftSampleMethod)
        )
        if self.rejection_sample_method is not None:
            _check_choice(
                f"{where}rejection_sample_method",
                self.rejection_sample_method,
                REJECTION_SAMPLE_METHODS,
            )
        if self.index_share_for_mtp_iteration is not None:
            _check_bool(f"{where}index_share_for_mtp_iteration", self.index_share_for_mtp_iteration)


@dataclass(frozen=True)
class RejectionSamplerConfig:
    """The object given as `additional_config.rejection_sampler_config`.

    Attributes:
        enable_block_verify: True asks for the rule "block", False for "standard".
    """

    enable_block_verify: bool | None = None

    def __post_init__(self) -> None:
        """Check each field."""
        if self.enable_block_verify is not None:
            _check_bool("rejection_sampler_config.enable_block_verify", self.enable_block_verify)


@dataclass(frozen=True)
class EngineConfig:
    """Every option of an engine.

    Attributes:
        model: directory of the checkpoint; None is the bundled one.
        device: a torch device, or "auto": an accelerator if torch sees one, else the CPU.
        dtype: of weights, states and logits; "auto" is float32.
        seed: makes requests without a seed of their own reproducible; None draws entropy.
        max_model_len: tokens of prompt and output together; None is the checkpoint's limit.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: rows of one step, prompts and drafts together.
        block_size: tokens of one block of the paged caches.
        kv_cache_memory: bytes for the paged caches; None is what max_num_seqs requests of
            max_model_len tokens can need.
        speculative: how to draft; None decodes plainly.
        rejection_sampler: second way to name the rule.
    """

    model: str | None = None
    device: str = "auto"
    dtype: DType = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory: int | None = None
    speculative: SpeculativeConfig | None = None
    rejection_sampler: RejectionSamplerConfig = field(default_factory=RejectionSamplerConfig)

    def __post_init__(self) -> None:
        """Check each field, and that they do not contradict each other."""
        _check_model(self.model)
        _check_choice("dtype", self.dtype, get_args(DType))
        _check_device(self.device)
        if self.seed is not None:
            _check_int("seed", self.seed, MIN_SEED, MAX_SEED)
        for name in ("max_model_len", "kv_cache_memory"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _check_int(name, getattr(self, name), 1)
        if not isinstance(self.speculative, SpeculativeConfig | None):
            raise ConfigError("speculative: give a dict as speculative_config to from_kwargs")
        if self.max_num_batched_tokens <= self.num_speculative_tokens:
            raise ConfigError(
                "max_num_batched_tokens must be greater than num_speculative_tokens "
                f"({self.num_speculative_tokens}), got {self.max_num_batched_tokens}"
            )
        self._check_rule()

    @classmethod
    def from_kwargs(cls, **options: Any) -> EngineConfig:
        """Build the tree from flat options named as in vLLM.

        `speculative_config` and `additional_config` are dicts or JSON text. The first error found
        is raised as one line that names the option.
        """
        values = {_ALIASES.get(name, name): value for name, value in options.items()}
        if len(values) != len(options):
            twice = next(alias for alias in _ALIASES if alias in options)
            raise ConfigError(f"{twice} and {_ALIASES[twice]} are the same option: give one")
        speculative = _object("speculative_config", values.pop("speculative_config", None))
        additional = _object("additional_config", values.pop("additional_config", None))
        names = [f.name for f in fields(cls) if f.name not in ("speculative", "rejection_sampler")]
        nested = ("speculative_config", "additional_config")
        _take_fixed("", values, names, _FIXED_OPTIONS, also=(*nested, *_ALIASES))
        if isinstance(values.get("model"), PathLike):
            values["model"] = fspath(values["model"])
        if isinstance(values.get("kv_cache_memory"), str):
            values["kv_cache_memory"] = parse_size("kv_cache_memory", values["kv_cache_memory"])
        if speculative is not None:
            known = [f.name for f in fields(SpeculativeConfig)]
            _take_fixed("speculative_config.", speculative, known, _FIXED_SPECULATIVE_OPTIONS)
            values["speculative"] = SpeculativeConfig(**speculative)
        if additional is not None:
            values["rejection_sampler"] = _rejection_sampler(additional)
        return cls(**values)

    def resolve(self) -> EngineConfig:
        """A new tree in which no field is "auto" and the device exists."""
        from outrider.device import default_device, is_present

        device = self.device
        if device == "auto":
            device = default_device()
        elif not is_present(device):
            raise ConfigError(f"device {shown(device)} is not there; write auto or cpu")
        return replace(self, device=device, dtype="float32" if self.dtype == "auto" else self.dtype)

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts asked for per step at most; 0 decodes plainly."""
        return 0 if self.speculative is None else self.speculative.num_speculative_tokens

    @property
    def rejection_sample_method(self) -> RejectionSampleMethod:
        """The rule for requests that name none: "block" unless another is configured.

        With one-hot drafts "block" keeps and emits exactly what "standard" does.
        """
        if self.speculative is not None and self.speculative.rejection_sample_method is not None:
            return self.speculative.rejection_sample_method
        return "standard" if self.rejection_sampler.enable_block_verify is False else "block"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it; "auto" is float32."""
        import torch

        return torch.float64 if self.dtype == "float64" else torch.float32

    def _check_rule(self) -> None:
        enabled = self.rejection_sampler.enable_block_verify
        method = None if self.speculative is None else self.speculative.rejection_sample_method
        if enabled is None or method is None:
            return
        meant = "block" if enabled else "standard"
        if method != meant:
            raise ConfigError(
                f'speculative_config.rejection_sample_method is "{method}" but '
                f"rejection_sampler_config.enable_block_verify {str(enabled).lower()} means "
                f'"{meant}": give one of the two'
            )


def parse_json_object(flag: str, text: str) -> dict[str, Any]:
    """Parse an option given as JSON text.

    Args:
        flag: name of the option as the user wrote it, such as "--speculative-config".
        text: what was given.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{flag}: no valid JSON at column {error.pos + 1}: {_json_hint(text, error)}: "
            f"{text.translate(_ONE_LINE)}"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{flag}: no valid JSON: nested too deep or a number too long") from None
    if not isinstance(value, dict):
        raise ConfigError(
            f'{flag} must be a JSON object such as {{"method": "mtp"}}, got {shown(text)}'
        )
    return value


def parse_size(name: str, text: str) -> int:
    """Bytes from a number with an optional unit of 1024: "4G", "512MiB"."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name} must be a number of bytes such as 4GiB, got {shown(text)}")
    return int(match[1]) * _SIZE_UNITS[match[2].upper()]


def _object(name: str, value: object) -> dict[str, Any] | None:
    if isinstance(value, str):
        return parse_json_object(name, value)
    if isinstance(value, Mapping):
        return dict(value)
    if value is not None:
        raise ConfigError(f"{name} must be a dict or a JSON object, got {shown(value)}")
    return None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f'"{twice}" is given twice')
    return result


def _json_hint(text: str, error: json.JSONDecodeError) -> str:
    rest = text[error.pos :].lstrip()
    if rest.startswith("'"):
        return "write double quotes, not single ones"
    is_after_comma = text[: error.pos].rstrip().endswith(",")
    if rest.startswith(("}", "]", ",}", ",]")) and (is_after_comma or rest.startswith(",")):
        return "remove the trailing comma"
    if rest.startswith(("True", "False", "None")):
        return "write true, false or null"
    return error.msg[:1].lower() + error.msg[1:]


def _take_fixed(
    where: str,
    values: dict[str, Any],
    known: Iterable[str],
    fixed: Mapping[str, tuple[object, ...]],
    also: Iterable[str] = (),
) -> None:
    """Refuse unknown keys, then drop the options that only have one state, if it is asked for."""
    candidates = [*known, *also, *fixed]
    for key in list(values):
        if not where and key in _REFUSED_OPTIONS:
            raise ConfigError(f"{key} is not supported: {_REFUSED_OPTIONS[key]}")
        if key not in candidates:
            near = difflib.get_close_matches(str(key), candidates, n=1, cutoff=0.0)
            raise ConfigError(
                f'unknown option {shown(where + str(key))}; the nearest is "{where}{near[0]}"'
            )
        if key in fixed:
            value = values.pop(key)
            if not any(value == one and type(value) is type(one) for one in fixed[key]):
                allowed = " or ".join(repr(one) for one in fixed[key])
                raise ConfigError(
                    f"{where}{key}: this build supports only {allowed}, got {shown(value)}"
                )


def _rejection_sampler(additional: dict[str, Any]) -> RejectionSamplerConfig:
    where = "additional_config."
    _take_fixed(where, additional, ("rejection_sampler_config",), {})
    values = _object(f"{where}rejection_sampler_config", additional.get("rejection_sampler_config"))
    if values is None:
        return RejectionSamplerConfig()
    known = [f.name for f in fields(RejectionSamplerConfig)]
    _take_fixed(f"{where}rejection_sampler_config.", values, known, {})
    return RejectionSamplerConfig(**values)


def _check_model(model: object) -> None:
    if model is not None and (not isinstance(model, str) or not model):
        raise ConfigError(f"model must be the path of a checkpoint, got {shown(model)}")


def _check_method(method: object) -> None:
    if method == "mtp":
        return
    if isinstance(method, str) and method.endswith("_mtp"):
        raise ConfigError(f'speculative_config.method: write "mtp", not "{method}"')
    raise ConfigError(f'speculative_config.method must be "mtp", got {shown(method)}')


def _check_device(device: object) -> None:
    if device == "auto":
        return
    from outrider.device import is_device_name

    if not is_device_name(device):
        raise ConfigError(f"device must be auto, cpu, cuda, cuda:0 or npu, got {shown(device)}")


def _check_int(
    name: str, value: object, least: int, most: int | None = None, hint: str = ""
) -> None:
    allowed = f"{least} or more" if most is None else f"from {least} to {most}"
    is_right = type(value) is int and least <= value and (most is None or value <= most)
    if not is_right:
        hint = f" ({hint})" if hint else ""
        raise ConfigError(f"{name} must be an integer {allowed}, got {shown(value)}{hint}")


def _check_bool(name: str, value: object) -> None:
    if type(value) is not bool:
        raise ConfigError(f"{name} must be true or false, got {shown(value)}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {shown(value)}"
        )
