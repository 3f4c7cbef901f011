"""Distributions of packages: fetched once, with the registries' own clients, and read in place.

`pip download` brings wheels and source distributions, `npm pack` packages of npm. Nothing is
unpacked on disk, and nothing of a package is run but what pip runs to learn a source distribution's
version.
"""

from __future__ import annotations

import email
import json
import lzma
import subprocess
import sys
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outrider.errors import OutriderError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outrider.training.recipe import Source

# A licence field longer than this holds the whole text.
_MAX_LICENCE_NAME = 40
# What the readers raise where an archive is cut short or damaged, some of it within a member.
_DAMAGES = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
)


def fetch(source: Source, folder: Path) -> Path:
    """Returns the distribution's file below `folder`, fetched if it is not there yet."""
    target = folder / source.kind / source.label.replace("/", "-")
    if not (target.is_dir() and any(target.iterdir())):
        target.mkdir(parents=True, exist_ok=True)
        _run(_command(source, target), source)
    files = [path for path in target.iterdir() if path.is_file()]
    if len(files) != 1:
        raise OutriderError(f"{target}: {len(files)} files where one distribution is expected")
    return files[0]


def read_members(archive: Path, source: Source) -> Iterator[tuple[str, bytes]]:
    """Yields path and content of the files that the source names, by path."""
    with _open(archive) as members:
        for path in sorted(members.paths):
            if source.matches(path):
                yield path, members.read(path)


def declared_licence(archive: Path, source: Source) -> str:
    """Returns what the distribution's own metadata calls its licence; "" where it does not say."""
    with _open(archive) as members:
        if source.kind == "npm":
            return _npm_licence(archive, members)
        names = [path for path in members.paths if path.endswith(".dist-info/METADATA")]
        if not names and "PKG-INFO" in members.paths:
            names = ["PKG-INFO"]
        if not names:
            raise OutriderError(f"{archive}: has no metadata")
        metadata = email.message_from_bytes(members.read(names[0]))
    for field in ("License-Expression", "License"):
        value = str(metadata.get(field, "")).strip()
        if value and len(value) <= _MAX_LICENCE_NAME:
            return value
    classifiers = metadata.get_all("Classifier") or []
    return "; ".join(
        str(line).rpartition(" :: ")[2] for line in classifiers if str(line).startswith("License")
    )


def _npm_licence(archive: Path, members: _Members) -> str:
    if "package.json" not in members.paths:
        raise OutriderError(f"{archive}: has no package.json")
    try:
        metadata = json.loads(members.read("package.json"))
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise OutriderError(f"{archive}: package.json: no valid JSON object")
    return str(metadata.get("license", ""))


def _command(source: Source, target: Path) -> list[str]:
    if source.kind == "npm":
        return [
            *("npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(target)),
            f"{source.name}@{source.version}",
        ]
    # What a build needs may come as wheels: only the package itself has to be its source.
    is_wheel = source.kind == "wheel"
    form = ("--only-binary", ":all:") if is_wheel else ("--no-binary", source.name)
    return [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"),
        *("download", "--no-deps", *form, "--dest", str(target)),
        f"{source.name}=={source.version}",
    ]


def _run(command: list[str], source: Source) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise OutriderError(f"{source.label}: the program {command[0]} is not installed") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise OutriderError(f"{source.label}: cannot be fetched: {reason}")


class _Members:
    """The files of an archive by their paths, the top folder of a source archive left out."""

    def __init__(self, archive: zipfile.ZipFile | tarfile.TarFile) -> None:
        self._archive = archive
        if isinstance(archive, zipfile.ZipFile):
            self.paths = {name: name for name in archive.namelist() if not name.endswith("/")}
        else:
            names = [member.name for member in archive.getmembers() if member.isfile()]
            self.paths = {name.partition("/")[2]: name for name in names}

    def read(self, path: str) -> bytes:
        name = self.paths[path]
        if isinstance(self._archive, zipfile.ZipFile):
            return self._archive.read(name)
        file = self._archive.extractfile(name)
        assert file is not None, "only regular files are listed"
        return file.read()


@contextmanager
def _open(archive: Path) -> Iterator[_Members]:
    try:
        is_zip = archive.suffix in (".whl", ".zip")
        with zipfile.ZipFile(archive) if is_zip else tarfile.open(archive) as file:
            yield _Members(file)
    except _DAMAGES as error:
        raise OutriderError(f"{archive}: cannot be read ({error})") from error
