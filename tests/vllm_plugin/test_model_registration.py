"""Which models vLLM is given, and where."""

import subprocess
import sys

import pytest

_SHOW = """
from vllm.model_executor.models import ModelRegistry
from outrider.vllm_plugin import register
register(); register()
for name in ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Qwen4ExpMTP"):
    print(ModelRegistry.models[name].module_name)
"""


@pytest.mark.vllm
def test_our_models_stand_in_for_vllms_on_the_cpu() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _SHOW], capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout.split()[-3:] == [
        "outrider.vllm_plugin.model",
        "outrider.vllm_plugin.model",
        "outrider.vllm_plugin.mtp",
    ]


@pytest.mark.vllm
def test_on_other_platforms_vllms_own_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms

    from outrider.vllm_plugin import model_registration

    assert model_registration.obstacle() is None
    monkeypatch.setattr(type(platforms.current_platform), "is_cpu", lambda self: False)
    assert "own model" in str(model_registration.obstacle())
