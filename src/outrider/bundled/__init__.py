"""The default checkpoint, and prompts from modules that its training did not see."""

from pathlib import Path

BUNDLED_MODEL_DIR = Path(__file__).parent
BUNDLED_PROMPTS = BUNDLED_MODEL_DIR / "prompts.jsonl"
BUNDLED_SUITES = {"code": BUNDLED_PROMPTS}
