"""What the options of benchmarks have in common."""

from outrider.errors import ConfigError


def parse_sizes(name: str, text: str, examples: str) -> list[int]:
    """The numbers of a list such as 1,4,8.

    Args:
        name: of the option.
        text: what was given.
        examples: of what is right, for the error.

    Raises:
        ConfigError: one of them is no whole number from 1.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{name} must be numbers from 1 such as {examples}, got {text!r}")
    return [int(part) for part in parts]
