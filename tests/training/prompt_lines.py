"""The prompts of a file as they were cut."""

import json
from pathlib import Path

from outrider.training.prompts import Prompt


def load_prompts(path: Path) -> list[Prompt]:
    # Not splitlines(): a JSON string may hold other line separators as they are.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [Prompt(**json.loads(line)) for line in lines if line]
