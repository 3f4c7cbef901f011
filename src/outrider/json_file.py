"""Reads the JSON files of a checkpoint; what is wrong with one is told in a line that names it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outrider.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that must hold one object."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path}: no valid JSON at line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except (RecursionError, ValueError):
        raise CheckpointError(
            f"{path}: no valid JSON: nested too deep or a number too long"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value
