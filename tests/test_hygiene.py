"""The rules for a file that no linter holds: its length, its name, what it reads, what it pins."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "outrider"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# One architecture is read best in one place.
EXEMPT_FROM_SIZE = (SOURCE / "models",)
# A file named so collects what belongs to no noun.
BANNED_NAMES = ("utils", "helpers", "common", "misc")
ENVIRONMENT_NAMES = ("environ", "environb", "getenv", "getenvb", "putenv")


def python_files() -> list[Path]:
    folders = ("src", "tests", "scripts", "benchmarks")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def size_findings(text: str) -> Iterator[str]:
    """Yields what is too long in one module."""
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"has {num_lines} lines; the limit is {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{node.name} has {num_lines} lines; the limit is {MAX_FUNCTION_LINES}"


def environment_findings(text: str) -> Iterator[str]:
    """Yields where one module reads or writes the environment of the process."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in ENVIRONMENT_NAMES:
                yield f"line {node.lineno} uses os.{name}"
            case ast.ImportFrom(module="os"):
                names = {alias.name for alias in node.names}.intersection(ENVIRONMENT_NAMES)
                yield from (f"line {node.lineno} imports os.{name}" for name in sorted(names))


def findings(paths: list[Path], check: Callable[[str], Iterator[str]]) -> list[str]:
    """Returns the findings of one check over several files, each with its file."""
    return [f"{p.relative_to(ROOT)}: {f}" for p in paths for f in check(p.read_text())]


def test_files_and_functions_are_short() -> None:
    paths = [p for p in python_files() if not any(map(p.is_relative_to, EXEMPT_FROM_SIZE))]
    assert findings(paths, size_findings) == []


def test_size_findings_catch_what_is_too_long() -> None:
    body = "    pass\n"
    assert list(size_findings("def f():\n" + body * (MAX_FUNCTION_LINES - 1))) == []
    assert list(size_findings("def f():\n" + body * MAX_FUNCTION_LINES)) == [
        "f has 61 lines; the limit is 60"
    ]
    assert list(size_findings("\n" * 401)) == ["has 401 lines; the limit is 400"]


def test_only_the_configuration_reads_the_environment() -> None:
    paths = [path for path in SOURCE.rglob("*.py") if not path.is_relative_to(SOURCE / "config")]
    assert findings(paths, environment_findings) == []


def test_environment_findings_catch_each_form() -> None:
    text = "import os\nfrom os import getenv, path\nos.environ['A']\nos.path.join('a')\n"
    assert sorted(environment_findings(text)) == [
        "line 2 imports os.getenv",
        "line 3 uses os.environ",
    ]


def test_modules_are_named_after_what_they_hold() -> None:
    named = [path for path in SOURCE.rglob("*") if path.stem in BANNED_NAMES]
    assert named == []


def pins(lines: list[str]) -> dict[str, str]:
    """Returns the exact versions among requirement lines, by normalised name."""
    exact = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in exact}


def test_constraints_pin_every_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    constraints = pins((ROOT / "constraints.txt").read_text().splitlines())
    dev = pins(project["dependency-groups"]["dev"])
    assert len(dev) == len(project["dependency-groups"]["dev"]), "a development tool has no pin"
    assert dev.items() <= constraints.items()
    extras = project["project"].get("optional-dependencies", {})
    ranges = [*project["project"]["dependencies"], *(r for group in extras.values() for r in group)]
    names = {re.split(r"[^a-z0-9-]", requirement)[0] for requirement in ranges}
    assert names <= constraints.keys()


@pytest.fixture(scope="module")
def check_files() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_files", ROOT / "scripts/check_files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NO_LAST_LINE_FEED = "does not end in exactly one line feed"
FILES = {
    "empty": ("a.txt", b"", []),
    "sound": ("a.txt", b"line\n", []),
    "sound binary": ("a.bin", b"\0no line feed", []),
    "sound yaml": ("a.yaml", b"a: [1]\n", []),
    "no line feed": ("a.txt", b"line", [NO_LAST_LINE_FEED]),
    "two line feeds": ("a.txt", b"line\n\n", [NO_LAST_LINE_FEED]),
    "trailing space": ("a.txt", b"line \n", ["has white space at the end of a line"]),
    "carriage return": ("a.txt", b"line\r\n", ["has carriage returns; lines end in a line feed"]),
    "conflict": ("a.txt", b"<" * 7 + b" ours\n", ["holds a merge conflict"]),
    "key": ("a.txt", b"-----BEGIN " + b"PRIVATE KEY-----\n", ["holds a private key"]),
    "key in a binary": ("a.bin", b"\0-----BEGIN RSA " + b"PRIVATE KEY", ["holds a private key"]),
    "large": ("a.bin", b"\0" * 26_000_001, ["has 26,000,001 bytes; the limit is 26,000,000"]),
    "not utf-8": ("a.txt", b"\xff\n", ["is not UTF-8: "]),
    "broken json": ("a.json", b"{]\n", ["does not parse as json: "]),
    "broken toml": ("a.toml", b"a =\n", ["does not parse as toml: "]),
    "broken yaml": ("a.yaml", b"a: [\n", ["does not parse as yaml: "]),
}


@pytest.mark.parametrize(("name", "data", "expected"), FILES.values(), ids=FILES.keys())
def test_check_files(
    check_files: ModuleType, tmp_path: Path, name: str, data: bytes, expected: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    found = list(check_files.findings(path))
    assert len(found) == len(expected), found
    assert all(part in line for part, line in zip(expected, found, strict=True)), found
    assert check_files.main([str(path)]) == int(bool(expected))
