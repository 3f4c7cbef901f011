"""Checks that every options class shares: one line that names the option and what is allowed."""

from __future__ import annotations

from outrider.errors import ConfigError, shown


def check_int(
    name: str, value: object, least: int, most: int | None = None, hint: str = ""
) -> None:
    """An integer, not a bool, from `least` to `most`."""
    allowed = f"{least} or more" if most is None else f"from {least} to {most}"
    is_right = type(value) is int and least <= value and (most is None or value <= most)
    if not is_right:
        hint = f" ({hint})" if hint else ""
        raise ConfigError(f"{name} must be an integer {allowed}, got {shown(value)}{hint}")


def check_bool(name: str, value: object) -> None:
    """True or False and nothing that is like it."""
    if type(value) is not bool:
        raise ConfigError(f"{name} must be true or false, got {shown(value)}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of the words."""
    if value not in choices:
        *others, last = choices
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"{name} must be {allowed}, got {shown(value)}")
