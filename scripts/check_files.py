"""Checks files for what no other tool sees: line ends, syntax of data files, size, private keys.

Takes the files to check, or all tracked files when none is named. Prints one line for each finding.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

MAX_BYTES = 26_000_000  # the bundled checkpoint may have 25 MB, and its neighbours are small
# Written by libraries in their own format, and kept byte for byte.
BUNDLED = Path("src/outrider/bundled")
PRIVATE_KEY = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY")
CONFLICT = re.compile(rb"^(?:<{7}|>{7}) ", re.MULTILINE)
TRAILING_SPACE = re.compile(rb"[ \t]+$", re.MULTILINE)

PARSERS: dict[str, Callable[[str], object]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".cff": yaml.safe_load,
}


def findings(path: Path) -> Iterator[str]:
    """Yields what is wrong with one file, without its name."""
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        yield f"has {len(data):,} bytes; the limit is {MAX_BYTES:,}"
    if PRIVATE_KEY.search(data):
        yield "holds a private key"
    if b"\0" in data[:8192]:
        return  # a binary file has no lines
    if not path.is_relative_to(BUNDLED):
        yield from line_findings(data)
    yield from syntax_findings(path, data)


def line_findings(data: bytes) -> Iterator[str]:
    """Yields what is wrong with the lines of a text file."""
    if CONFLICT.search(data):
        yield "holds a merge conflict"
    if b"\r" in data:
        yield "has carriage returns; lines end in a line feed"
    if data and (not data.endswith(b"\n") or data.endswith(b"\n\n")):
        yield "does not end in exactly one line feed"
    if TRAILING_SPACE.search(data):
        yield "has white space at the end of a line"


def syntax_findings(path: Path, data: bytes) -> Iterator[str]:
    """Yields why a text file is no UTF-8, or a data file does not parse."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        yield f"is not UTF-8: {error}"
        return
    parse = PARSERS.get(path.suffix)
    if parse is None:
        return
    try:
        parse(text)
    except (ValueError, yaml.YAMLError) as error:
        first_line = str(error).splitlines()[0]
        yield f"does not parse as {path.suffix[1:]}: {first_line}"


def tracked_files() -> list[Path]:
    """Returns the tracked files that are in the working tree."""
    listing = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True)
    paths = [Path(name.decode()) for name in listing.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def main(names: list[str]) -> int:
    """Checks the named files, or all tracked ones, and returns the exit code."""
    paths = [Path(name) for name in names] or tracked_files()
    lines = [f"{path} {finding}" for path in paths for finding in findings(path)]
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
