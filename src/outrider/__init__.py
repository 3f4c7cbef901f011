"""Speculative decoding of Qwen4-Exp checkpoints with their own multi-token-prediction head.

from outrider import LLM, SamplingParams

llm = LLM(speculative_config={"method": "mtp", "num_speculative_tokens": 3})
print(llm.generate("def main(", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.config import EngineConfig
    from outrider.entrypoints.async_llm import AsyncLLM
    from outrider.entrypoints.llm import LLM
    from outrider.outputs import CompletionOutput, RequestOutput
    from outrider.sampling_params import RequestOutputKind, SamplingParams
    from outrider.structured_outputs import StructuredOutputsParams

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

# Imported when first asked for: the engine needs torch, whose import takes seconds.
_MODULES = {
    "LLM": "outrider.entrypoints.llm",
    "AsyncLLM": "outrider.entrypoints.async_llm",
    "CompletionOutput": "outrider.outputs",
    "EngineConfig": "outrider.config",
    "RequestOutput": "outrider.outputs",
    "RequestOutputKind": "outrider.sampling_params",
    "SamplingParams": "outrider.sampling_params",
    "StructuredOutputsParams": "outrider.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("outrider")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
