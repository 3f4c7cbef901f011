"""`outrider vllm doctor`: without vLLM, with one of another version, and on the real one."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from outrider.entrypoints.cli import main


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The line of a doctor that must refuse."""
    assert main(["vllm", "doctor"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("spec", [None, ModuleSpec("vllm", None)], ids=["none", "empty folder"])
def test_without_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: ModuleSpec | None
) -> None:
    monkeypatch.setattr("outrider.vllm_plugin.hooks.find_spec", {"vllm": spec}.__getitem__)
    assert error_line(capsys) == (
        "error: vLLM is not installed here; the plugin is for vLLM >=0.32, <0.33\n"
    )


def test_another_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None, origin="vllm/__init__.py")
    module.__version__ = "0.31.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert error_line(capsys) == (
        "error: vLLM 0.31.2 is installed: the plugin was written for vLLM >=0.32, <0.33\n"
    )


def test_the_command_without_a_word_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm"]) == 2
    assert "doctor" in capsys.readouterr().out


def test_the_entry_point_is_light() -> None:
    code = (
        "import sys, outrider.vllm_plugin\n"
        "assert not {'vllm', 'torch', 'outrider.vllm_plugin.hooks'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
