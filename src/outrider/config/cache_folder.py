"""The folder in which a user's programs keep what they can make again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """Outrider's part of it: `$XDG_CACHE_HOME/outrider`, by default `~/.cache/outrider`.

    Raises:
        RuntimeError: the variable is not set, and the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
