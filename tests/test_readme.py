"""The README's commands run as written; what sets up the machine is left out."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
]
# The step is quoted, not run: it is compared with the source instead.
PROGRAMS = [block for language, block in BLOCKS if language == "python" and "self." not in block]


def run(*words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) >= 3
    assert len(PROGRAMS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "outrider"
    assert run("-m", "outrider", *words).strip()


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str) -> None:
    assert run("-c", program).strip()


def test_the_step_is_the_one_of_the_source() -> None:
    step = next(block for _, block in BLOCKS if "self.scheduler.schedule()" in block)
    source = (ROOT / "src/outrider/engine/engine.py").read_text(encoding="utf-8")
    assert re.sub(r"\s+", "", step) in re.sub(r"\s+", "", source)


@pytest.mark.parametrize("target", ["run", "test", "verify", "bench"])
def test_make_knows_the_targets_named(target: str) -> None:
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_tree_names_what_is_there() -> None:
    tree = next(block for _, block in BLOCKS if block.startswith("src/outrider/"))
    names = re.findall(r"^  ([\w./ ]+?)(?:   |  )", tree, re.MULTILINE)
    listed = [name for names_of_line in names for name in names_of_line.split()]
    assert listed
    for name in listed:
        assert (ROOT / "src/outrider" / name).exists(), name
