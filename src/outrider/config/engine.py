"""Every option of an engine, with vLLM's names, in one frozen tree.

"auto" is resolved once, by `EngineConfig.resolve`, into a new object. torch is imported where a
device or dtype is looked at and not before: the command line and `import outrider` start at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, get_args

from outrider.config.checks import check_bool, check_choice, check_int
from outrider.config.parsing import parse_size, read_object, take_known
from outrider.config.speculative import (
    CompilationConfig,
    RejectionSampleMethod,
    RejectionSamplerConfig,
    SpeculativeConfig,
)
from outrider.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

DType = Literal["auto", "float32", "float64"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1

# Options of vLLM that this build knows in one state only: asking for that state is no error.
_FIXED_OPTIONS: dict[str, tuple[object, ...]] = {
    "async_scheduling": (False,),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "enable_chunked_prefill": (True,),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "enforce_eager": (True,),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto", "safetensors"),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "scheduling_policy": ("fcfs",),
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
# In bytes, or as a text such as 4GiB.
_SIZES = ("kv_cache_memory", "prefix_cache_memory")
_ALIASES = {"kv_cache_memory_bytes": "kv_cache_memory"}
# vLLM's options that have no counterpart, with what to write.
_REFUSED_OPTIONS = {
    "gpu_memory_utilization": "give the bytes for the caches as kv_cache_memory",
    "swap_space": "there is no swapping; give the bytes for the caches as kv_cache_memory",
}
# Fields that hold an object of their own, and the options that give them.
NESTED_OPTIONS = {
    "speculative": "speculative_config",
    "compilation": "compilation_config",
    "rejection_sampler": "additional_config",
}
_NESTED_CLASSES = {
    "speculative": SpeculativeConfig,
    "compilation": CompilationConfig,
    "rejection_sampler": RejectionSamplerConfig,
}


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
        max_num_batched_tokens: rows of one step, prompts and drafts together; no more requests run
            than find room in it with all their drafts.
        long_prefill_token_threshold: rows of one prompt in one step; 0 is as many as fit.
        block_size: tokens of one block of the paged caches.
        kv_cache_memory: bytes for the paged caches; None is what max_num_seqs requests of
            max_model_len tokens can need. Where less is there, requests wait or give way.
        enable_prefix_caching: keep what requests have run, for others that begin with the same
            tokens.
        prefix_cache_memory: bytes for the recurrent states that are kept at block boundaries; None
            is as much as the paged caches get, in a tenth of the memory at hand at most.
        max_logprobs: the most `logprobs` a request may ask for; -1 is the whole vocabulary.
        logprobs_mode: "raw_logprobs" reports the model's own probabilities, "processed_logprobs"
            those that the token was drawn from.
        speculative: how to draft; None decodes plainly.
        compilation: which steps are captured as graphs; none are.
        rejection_sampler: second way to name the rule.
    """

    model: str | None = None
    device: str = "auto"
    dtype: DType = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    block_size: int = 16
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_memory: int | None = None
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    speculative: SpeculativeConfig | None = None
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    rejection_sampler: RejectionSamplerConfig = field(default_factory=RejectionSamplerConfig)

    def __post_init__(self) -> None:
        """Check each field, and that they do not contradict each other."""
        _check_model(self.model)
        check_choice("dtype", self.dtype, get_args(DType))
        check_choice("logprobs_mode", self.logprobs_mode, get_args(LogprobsMode))
        _check_device(self.device)
        if self.seed is not None:
            check_int("seed", self.seed, MIN_SEED, MAX_SEED)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        if self.prefix_cache_memory is not None and not self.enable_prefix_caching:
            raise ConfigError("prefix_cache_memory needs enable_prefix_caching true")
        for name in ("max_model_len", *_SIZES):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            check_int(name, getattr(self, name), 1)
        check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        check_int("max_logprobs", self.max_logprobs, -1)
        for name, cls in _NESTED_CLASSES.items():
            value = getattr(self, name)
            if not isinstance(value, cls) and not (name == "speculative" and value is None):
                raise ConfigError(f"{name}: give a dict as {NESTED_OPTIONS[name]} to from_kwargs")
        if self.max_num_batched_tokens <= self.num_speculative_tokens:
            raise ConfigError(
                "max_num_batched_tokens must be greater than num_speculative_tokens "
                f"({self.num_speculative_tokens}), got {self.max_num_batched_tokens}"
            )
        self._check_rule()

    @classmethod
    def from_kwargs(cls, **options: Any) -> EngineConfig:
        """Build the tree from flat options named as in vLLM.

        `speculative_config`, `compilation_config` and `additional_config` are dicts or JSON text.
        The first error found is raised as one line that names the option.
        """
        values = {_ALIASES.get(name, name): value for name, value in options.items()}
        if len(values) != len(options):
            twice = next(alias for alias in _ALIASES if alias in options)
            raise ConfigError(f"{twice} and {_ALIASES[twice]} are the same option: give one")
        for key, advice in _REFUSED_OPTIONS.items():
            if key in values:
                raise ConfigError(f"{key} is not supported: {advice}")
        nested = {
            name: read_object(option, values.pop(option, None))
            for name, option in NESTED_OPTIONS.items()
        }
        names = [f.name for f in fields(cls) if f.name not in nested]
        take_known("", values, names, _FIXED_OPTIONS, also=(*NESTED_OPTIONS.values(), *_ALIASES))
        if isinstance(values.get("model"), PathLike):
            values["model"] = fspath(values["model"])
        for name in _SIZES:
            if isinstance(values.get(name), str):
                values[name] = parse_size(name, values[name])
        if nested["rejection_sampler"] is not None:
            nested["rejection_sampler"] = _rejection_sampler_options(nested["rejection_sampler"])
        for name, given in nested.items():
            if given is not None:
                values[name] = _nested(name, given)
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
    def drafter_max_model_len(self) -> int | None:
        """Positions from here on get no draft; None is no such limit."""
        return None if self.speculative is None else self.speculative.max_model_len

    @property
    def uses_mtp(self) -> bool:
        """Whether the checkpoint's head drafts."""
        return self.speculative is not None and self.speculative.method == "mtp"

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


def _nested(name: str, values: dict[str, Any]) -> Any:
    """One nested object from its options, in which an unknown key is an error."""
    cls = _NESTED_CLASSES[name]
    where = f"{NESTED_OPTIONS[name]}."
    if name == "rejection_sampler":
        where += "rejection_sampler_config."
    fixed = _FIXED_SPECULATIVE_OPTIONS if name == "speculative" else {}
    take_known(where, values, [f.name for f in fields(cls)], fixed)
    return cls(**values)


def _rejection_sampler_options(additional: dict[str, Any]) -> dict[str, Any] | None:
    """What `additional_config` holds: one object, of the rejection sampler."""
    take_known("additional_config.", additional, ("rejection_sampler_config",), {})
    name = "additional_config.rejection_sampler_config"
    return read_object(name, additional.get("rejection_sampler_config"))


def _check_model(model: object) -> None:
    if model is not None and (not isinstance(model, str) or not model):
        raise ConfigError(f"model must be the path of a checkpoint, got {shown(model)}")


def _check_device(device: object) -> None:
    if device == "auto":
        return
    from outrider.device import is_device_name

    if not is_device_name(device):
        raise ConfigError(f"device must be auto, cpu, cuda, cuda:0 or npu, got {shown(device)}")
