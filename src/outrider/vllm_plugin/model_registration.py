"""Hook: Qwen4-Exp and its head as models of our own, and the proposer that drives the head."""

from __future__ import annotations

from outrider.vllm_plugin import proposer

_MODELS = {
    "Qwen4ExpForCausalLM": "model",
    "Qwen4ExpForConditionalGeneration": "model",
    "Qwen4ExpMTP": "mtp",
}


def obstacle() -> str | None:
    """VLLM has kernels of its own on two kinds of accelerators."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None
    if current_platform.is_cuda() or current_platform.is_rocm():
        return "vLLM's own model runs on this platform"
    return "written for the CPU alone"


def install() -> None:
    """Names our classes to vLLM; they are imported when a checkpoint asks for them."""
    from vllm.model_executor.models import ModelRegistry

    for architecture, module in _MODELS.items():
        ModelRegistry.register_model(architecture, f"{__package__}.{module}:{architecture}")
    proposer.install()
