"""Where prompts come from: arguments, a file, or stdin."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError, shown

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS_HELP = (
    "File with a prompt in each line: a JSON object with prompt (or prompt_token_ids) if its name "
    "ends in .jsonl, else the text itself; empty lines are skipped."
)
_KEYS = ("prompt", "prompt_token_ids")

PromptInput = str | dict[str, Any]


def read_prompts(arguments: list[str], file: Path | None) -> list[PromptInput]:
    """The prompts that a command was given.

    Args:
        arguments: one prompt each; a single "-" is stdin, and so is none at all where stdin is a
            pipe or a file. The whole of stdin is one prompt, without its last line break.
        file: as `PROMPTS_HELP` says; excludes arguments.
    """
    if file is not None:
        if arguments:
            raise RequestError("give prompts as arguments or as --prompts, not both")
        return read_prompts_file(file)
    if arguments == ["-"]:
        return [_read_stdin()]
    if "-" in arguments:
        raise RequestError("- (stdin) is one prompt and excludes others")
    if arguments:
        return [*arguments]
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError("no prompt: write one, --prompts FILE, or - to read stdin")
    return [_read_stdin()]


def read_prompts_file(path: Path) -> list[PromptInput]:
    """The prompts of a file, one a line."""
    return [prompt for prompt, _ in read_sourced_prompts(path)]


def read_sourced_prompts(path: Path) -> list[tuple[PromptInput, str]]:
    """The prompts of a file, one a line, each with what it was cut from.

    That is the source that its line names. A prompt whose line names none is a source of its own,
    with those that are equal to it.
    """
    is_json = path.suffix == ".jsonl"
    prompts: list[tuple[PromptInput, str]] = [
        _parse_line(f"{path}: line {number}", line) if is_json else (line, line)
        for number, line in _lines(path)
    ]
    if not prompts:
        raise RequestError(f"{path}: no prompt in it")
    return prompts


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers from 1."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 text at byte {error.start}") from None
    # Not splitlines(): a JSON string may hold other line separators as they are.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parse_line(where: str, line: str) -> tuple[dict[str, Any], str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise RequestError(f"{where}: no valid JSON: {reason}") from None
    given = {key: value[key] for key in _KEYS if key in value} if isinstance(value, dict) else {}
    if not given:
        raise RequestError(
            f'{where}: must be an object such as {{"prompt": "def f("}}, got {shown(value)}'
        )
    source = value.get("source")
    if not isinstance(source, str):
        # A number, say, names a document as well as a text does.
        source = json.dumps(given if source is None else source, sort_keys=True)
    return given, source


def _read_stdin() -> str:
    if sys.stdin is None:
        raise RequestError("stdin: closed; there is no prompt to read")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise RequestError(f"stdin: cannot be read: {error.strerror}") from None
    return text.removesuffix("\n").removesuffix("\r")
