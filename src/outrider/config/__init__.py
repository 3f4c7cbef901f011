"""Options of the engine: a frozen tree with vLLM's names; an unknown key is an error."""

from outrider.config.engine import (
    MAX_SEED,
    MIN_SEED,
    NESTED_OPTIONS,
    DType,
    EngineConfig,
    LogprobsMode,
)
from outrider.config.head_tuning import HeadTuningConfig, LossKind
from outrider.config.parsing import parse_json_object, parse_size
from outrider.config.server import ServerConfig
from outrider.config.speculative import (
    LEAST_DRAFTED_TOKENS,
    MAX_SPECULATIVE_TOKENS,
    REJECTION_SAMPLE_METHODS,
    CompilationConfig,
    DraftSampleMethod,
    RejectionSampleMethod,
    RejectionSamplerConfig,
    SpeculativeConfig,
    SpeculativeMethod,
)

__all__ = [
    "LEAST_DRAFTED_TOKENS",
    "MAX_SEED",
    "MAX_SPECULATIVE_TOKENS",
    "MIN_SEED",
    "NESTED_OPTIONS",
    "REJECTION_SAMPLE_METHODS",
    "CompilationConfig",
    "DType",
    "DraftSampleMethod",
    "EngineConfig",
    "HeadTuningConfig",
    "LogprobsMode",
    "LossKind",
    "RejectionSampleMethod",
    "RejectionSamplerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "SpeculativeMethod",
    "parse_json_object",
    "parse_size",
]
