"""Errors that a user can cause: one line that names the thing and says what would be right."""

from __future__ import annotations


class OutriderError(ValueError):
    """Base of every user-facing error; the command line prints it and exits with 2."""


class ConfigError(OutriderError):
    """An engine option that is unknown, out of range, or cannot be honoured."""


class CheckpointError(OutriderError):
    """A checkpoint that is missing, damaged, or of another architecture."""


class RequestError(OutriderError):
    """A request that cannot be served: its prompt or one of its sampling parameters."""
