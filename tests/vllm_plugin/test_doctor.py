"""`outrider vllm doctor`: without vLLM, with one of another version, and on the real one."""

import os
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from outrider.entrypoints.cli import main
from outrider.vllm_plugin.hooks import HOOKS

ROOT = Path(__file__).parents[2]


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


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    """A folder that offers the plugin to vLLM, as an installed package does."""
    folder = tmp_path / "plugin-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = project["entry-points"]["vllm.general_plugins"]
    lines = [f"{name} = {value}\n" for name, value in group.items()]
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "".join(lines))
    return tmp_path


def run_doctor(*folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = ":".join(map(str, (ROOT / "src", *folders)))
    return subprocess.run(
        [sys.executable, "-m", "outrider", "vllm", "doctor"],
        env=os.environ | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.vllm
def test_an_installation(entry_point: Path) -> None:
    ended = run_doctor(entry_point, OUTRIDER_VLLM_METRICS="0")
    assert ended.returncode == 0, ended.stderr
    first, *lines, last = ended.stdout.splitlines()
    assert first.startswith("vLLM 0.32.")
    states = {line.split()[1]: line.split()[0] for line in lines}
    assert states == {hook.name: "off" if hook.name == "metrics" else "on" for hook in HOOKS}
    assert next(line for line in lines if "metrics" in line).endswith("OUTRIDER_VLLM_METRICS=0")
    assert "_UNEVEN_EXCHANGES=0" in last


@pytest.mark.vllm
def test_an_installation_that_vllm_does_not_see(entry_point: Path) -> None:
    ended = run_doctor(entry_point, VLLM_PLUGINS="another")
    assert ended.returncode == 2
    assert "error: vLLM does not load the plugin: VLLM_PLUGINS does not name outrider" in (
        ended.stderr
    )


@pytest.mark.vllm
def test_a_switch_that_is_no_switch(entry_point: Path) -> None:
    ended = run_doctor(entry_point, OUTRIDER_VLLM_METRICS="no")
    assert ended.returncode == 2
    assert "error: OUTRIDER_VLLM_METRICS must be 0 (off) or 1 (on), got 'no'" in ended.stderr
