"""The command `outrider generate`, run within the process of the test."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.entrypoints.cli import main
from tests.entrypoints.plan_line import without_plan


class Generate:
    """Runs the command on the tiny checkpoint."""

    def __init__(self, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model_dir = model_dir
        self.capsys = capsys

    def __call__(self, *arguments: str) -> tuple[str, str]:
        """What it wrote to stdout and stderr, but for what the caches take."""
        model = ("--model", str(self.model_dir), "--max-tokens", "6")
        assert main(["generate", *model, *arguments]) == 0
        captured = self.capsys.readouterr()
        return captured.out, without_plan(captured.err)

    def json(self, *arguments: str) -> dict[str, Any]:
        out, err = self(*arguments, "--json")
        # Only what the loader logs.
        assert all("skipped" in line for line in err.splitlines())
        value: dict[str, Any] = json.loads(out.splitlines()[-1])
        return value

    def ids(self, *arguments: str) -> list[list[int]]:
        return [output["token_ids"] for output in self.json(*arguments)["outputs"]]
