"""The command on the tiny checkpoint."""

from pathlib import Path

import pytest

from tests.entrypoints.generate_command import Generate


@pytest.fixture
def generate(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    return Generate(model_dir, capsys)
