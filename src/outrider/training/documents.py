"""Texts that a training run reads: files, folders of files, and lines of JSON.

Runs before the first step; `corpus.py` makes token ids of what is read here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

JSON_LINES_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Document:
    """One text."""

    source: str  # where it stands: a path with forward slashes, or what a line of JSON names
    text: str


def read_documents(option: str, paths: Sequence[Path], suffixes: Sequence[str]) -> list[Document]:
    """Reads every text below the paths, in their order; those of a folder are ordered by path.

    A file whose name ends in .jsonl holds a text a line, `{"text": ..., "source": ...}`: `source`
    may be missing, other keys are not read. Any other file is one text, and has to be UTF-8. In a
    folder, names that start with a dot are passed over. Blank texts are left out.

    Args:
        option: what the paths were given as, for errors.
        paths: files and folders; a file that is named is read whatever its suffix is.
        suffixes: ends of the names that are read in folders, such as (".py", ".md").

    Raises:
        OutriderError: a path is missing or cannot be read, a text is not UTF-8, a line is no such
            object, or there is no text at all.
    """
    documents = [
        document
        for path in paths
        for file in _files(option, path, tuple(suffixes))
        for document in _read_file(file)
        if document.text.strip()
    ]
    if not documents:
        names = ", ".join(str(path) for path in paths)
        raise OutriderError(f"{option}: no text in {names} (in folders: {' '.join(suffixes)})")
    return documents


def read_text(path: Path) -> str:
    """Reads one file of UTF-8 text, its line breaks as they are."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise OutriderError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise OutriderError(f"{path}: cannot be read ({error.strerror})") from error


def write_json_lines(path: Path, documents: Sequence[Document]) -> None:
    """Writes a file that `read_documents` reads back."""
    lines = [
        json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False) + "\n"
        for document in documents
    ]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def _files(option: str, path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise OutriderError(f"{option}: {path}: no such file or folder")
    return sorted(
        file
        for file in path.rglob("*")
        if file.name.endswith(suffixes)
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.is_file()
    )


def _read_file(path: Path) -> Iterator[Document]:
    text = read_text(path)
    if path.suffix != JSON_LINES_SUFFIX:
        yield Document(path.as_posix(), text)
        return
    # Not splitlines(): a JSON string may hold other line separators as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _parse_line(f"{path}: line {number}", line)


def _parse_line(where: str, line: str) -> Document:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise OutriderError(f"{where}: no valid JSON: {reason}") from None
    text = value.get("text") if isinstance(value, dict) else None
    source = value.get("source", where) if isinstance(value, dict) else None
    if not isinstance(text, str) or not isinstance(source, str):
        raise OutriderError(
            f'{where}: must be an object such as {{"text": "...", "source": "a.py"}}, '
            f"got {shown(value)}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OutriderError(
            f"{where}: no valid Unicode text: {text[error.start]!r} at character {error.start}"
        ) from None
    return Document(source, text)
