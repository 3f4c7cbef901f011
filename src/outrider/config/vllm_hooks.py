"""The environment variables that switch parts of the vLLM plugin off."""

from __future__ import annotations

import os

from outrider.errors import ConfigError, shown

_PREFIX = "OUTRIDER_VLLM_"


def hook_variable(name: str) -> str:
    """The variable of a hook: OUTRIDER_VLLM_BLOCK_VERIFICATION for block-verification."""
    return _PREFIX + name.upper().replace("-", "_")


def is_hook_wanted(name: str) -> bool:
    """Whether the environment leaves a hook on: its variable is 1 or not set; 0 is off."""
    variable = hook_variable(name)
    value = os.environ.get(variable, "1")
    if value not in ("0", "1"):
        raise ConfigError(f"{variable} must be 0 (off) or 1 (on), got {shown(value)}")
    return value == "1"
