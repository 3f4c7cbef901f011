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


class ContextLengthError(RequestError):
    """A prompt that is longer than the model can read."""


class EngineDeadError(RuntimeError):
    """The engine behind an `AsyncLLM` has ended, by an error or because it was shut down."""


def error_line(error: OutriderError | OSError, output: object = "the output") -> str:
    """What a program says of an error before it ends.

    Args:
        error: a user's, or the system's.
        output: what the program writes; named where the system names no file, as for a full disk.
    """
    message = str(error)
    if isinstance(error, OSError):
        message = f"{error.filename or output}: {error.strerror or error}"
    return f"error: {' '.join(message.split())}\n"


def shown(value: object) -> str:
    """What a user gave, as part of an error line: its repr, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:
        # An integer of thousands of digits, which Python does not print.
        return f"a {type(value).__name__} too long to print"
    except RecursionError:
        return f"a {type(value).__name__} nested too deep to print"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_unicode(name: str, text: str) -> None:
    """Raises a RequestError where a text has a half of a surrogate pair, which no UTF-8 has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is no valid Unicode text: {shown(text[error.start])} at character "
            f"{error.start}"
        ) from None
