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


_PROPOSERS = """
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer
from vllm.v1.worker import gpu_model_runner
before = EagleProposer.__init__, SpecDecodeBaseProposer.model_returns_tuple
from outrider.vllm_plugin import register
register(); register()
after = EagleProposer.__init__, SpecDecodeBaseProposer.model_returns_tuple
# The runner asks by these names which way it drafts.
print(issubclass(Step3p5MTPProposer, gpu_model_runner.EagleProposer))
print([new.__wrapped__ is old for new, old in zip(after, before)])
"""


@pytest.mark.vllm
def test_proposers_of_other_heads_stay_what_the_runner_takes_them_for() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PROPOSERS], capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout.splitlines()[-2:] == ["True", "[True, True]"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("is_cpu", None),
        ("is_cuda", "vLLM's own model runs on this platform"),
        ("is_rocm", "vLLM's own model runs on this platform"),
        ("is_xpu", "written for the CPU alone"),
        ("is_out_of_tree", "written for the CPU alone"),
    ],
)
def test_platforms(monkeypatch: pytest.MonkeyPatch, kind: str, told: str | None) -> None:
    from vllm import platforms

    from outrider.vllm_plugin import model_registration

    for name in ("is_cpu", "is_cuda", "is_rocm", "is_xpu", "is_out_of_tree"):
        is_kind = name == kind
        monkeypatch.setattr(
            type(platforms.current_platform), name, lambda self, is_kind=is_kind: is_kind
        )
    assert model_registration.obstacle() == told
