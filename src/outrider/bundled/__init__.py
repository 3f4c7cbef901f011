"""The default checkpoint, and prompts from files that its training did not see."""

from pathlib import Path

BUNDLED_MODEL_DIR = Path(__file__).parent
BUNDLED_PROMPTS = BUNDLED_MODEL_DIR / "prompts.jsonl"
# Held-out prompts by the kind of their text; suites/README.md says where they are from.
BUNDLED_SUITES = {
    name: BUNDLED_MODEL_DIR / "suites" / f"{name}.jsonl" for name in ("code", "prose", "json")
}
