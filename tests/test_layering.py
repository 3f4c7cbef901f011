"""Imports point down the layers of the package, and nowhere in a circle.

Every import counts, wherever it stands: at the top, inside a function, under TYPE_CHECKING, or as
the constant argument of `import_module`. What a type hint needs is a dependency of the design too.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "outrider"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Each unit is a module or a sub-package directly below the package. A unit imports from its own
# layer and from those before it.
LAYERS = (
    (
        "errors",
        "config",
        "structured_outputs",
        "sampling_params",
        "request",
        "batch",
        "logprobs",
        "stop_checker",
        "device",
        "json_file",
        "tokenizer",
        "generation_config",
        "chat_template",
        "bundled",
    ),
    ("ops",),
    ("cache", "layers", "sampling", "grammar"),
    ("models",),
    ("spec_decode",),
    # What comes out holds the figures of drafting.
    ("engine", "outputs"),
    ("entrypoints",),
)
LEVELS = {unit: level for level, units in enumerate(LAYERS) for unit in units}
TOP = len(LAYERS) - 1
# Levels that must not know what a request is.
PURE_LEVELS = (1, 2, 3)
# Beside the layers: the highest level that each may import. Only the top level may import them, and
# none imports another.
SIDES = {"training": 4, "vllm_plugin": 4}
# The package itself re-exports, and __main__ starts the command line: both may import anything.
ROOTS = (PACKAGE, f"{PACKAGE}.__main__")
# Third-party packages, and the only units that may import them.
RESTRICTED = {"vllm": ("vllm_plugin",), "transformers": ()}


class Import(NamedTuple):
    """One import: who, of what, where. `target` is a module, `names` what is taken from it."""

    importer: str
    target: str
    names: tuple[str, ...]
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def modules(source: Path) -> dict[str, Path]:
    """Returns the modules below `source`, by dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(importer: str, path: Path) -> Iterator[Import]:
    """Yields the imports of one module, relative ones resolved."""
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(importer, alias.name, (), node.lineno)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: package.count(".") + 2 - node.level]
                    base = ".".join([*parents, base] if base else parents)
                yield Import(importer, base, tuple(a.name for a in node.names), node.lineno)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called),
                args=[ast.Constant(value=str(target)), *_],
            ) if called in ("import_module", "__import__"):
                yield Import(importer, target, (), node.lineno)


def split_names(found: Import, known: dict[str, Path]) -> Iterator[Import]:
    """Yields one import for each name taken, with a sub-module or a unit as a target of its own."""
    if not found.names:
        yield found
    for name in found.names:
        below = f"{found.target}.{name}"
        is_unit = found.target == PACKAGE and (name in LEVELS or name in SIDES)
        if below in known or is_unit:
            yield found._replace(target=below, names=())
        else:
            yield found._replace(names=(name,))


def unit_of(module: str) -> str:
    """Returns the unit that a module of the package belongs to."""
    return module.split(".")[1]


def layer_violation(found: Import) -> str | None:
    """Returns why an import from within the package is against the layers, or None."""
    importer = unit_of(found.importer)
    if found.target in ROOTS:
        if found.names == ("__version__",):
            return None
        return f"{found}: import from the module that defines the name, not from the package"
    target = unit_of(found.target)
    if importer == target:
        return None
    if target in SIDES:
        if LEVELS.get(importer) == TOP:
            return None
        return f"{found}: only the top layer imports {target}"
    if target == "request" and LEVELS.get(importer) in PURE_LEVELS:
        return f"{found}: L{LEVELS[importer]} takes tensors and plain values, no requests"
    ceiling = SIDES[importer] if importer in SIDES else LEVELS[importer]
    if LEVELS[target] > ceiling:
        return f"{found}: {importer} (up to L{ceiling}) must not import L{LEVELS[target]}"
    return None


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the nodes of a circle in the graph, first and last the same, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def violations(source: Path) -> list[str]:
    """Returns one line for every import below `source` that is against the rules."""
    known = modules(source)
    units = {unit_of(module) for module in known if module not in ROOTS}
    unknown = units - LEVELS.keys() - SIDES.keys()
    if unknown:
        return [f"{PACKAGE}.{unit} is in no layer; add it to the table" for unit in sorted(unknown)]
    lines = []
    module_graph: dict[str, set[str]] = {module: set() for module in known}
    unit_graph: dict[str, set[str]] = {unit: set() for unit in units}
    every = [i for m, p in known.items() for f in imports(m, p) for i in split_names(f, known)]
    for found in every:
        top_level = found.target.split(".")[0]
        importer = None if found.importer in ROOTS else unit_of(found.importer)
        if importer not in RESTRICTED.get(top_level, (importer,)):
            lines.append(f"{found}: {top_level} is only for {RESTRICTED[top_level] or 'tests'}")
        if top_level != PACKAGE or importer is None:
            continue
        if (reason := layer_violation(found)) is not None:
            lines.append(reason)
            continue
        if found.target in known:
            module_graph[found.importer].add(found.target)
        if found.target not in ROOTS and unit_of(found.target) != importer:
            unit_graph[importer].add(unit_of(found.target))
    for what, graph in (("modules", module_graph), ("units", unit_graph)):
        if nodes := circle(graph):
            lines.append(f"{what} in a circle: {' -> '.join(nodes)}")
    return lines


def test_imports_point_down() -> None:
    assert len(modules(SOURCE)) > 10, f"found next to nothing under {SOURCE}"
    assert violations(SOURCE) == []


def test_the_table_of_contributing_is_this_one() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| L\d \| (.+?) \|", text, re.MULTILINE)
    listed = [{name.rstrip("/") for name in re.findall(r"`(.+?)`", row)} for row in rows]
    assert listed == [set(layer) for layer in LAYERS]
    sides = re.findall(r"`(\w+)/` \(up to L(\d)\)", text)
    assert {name: int(level) for name, level in sides} == SIDES


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    """Writes modules below `folder` and returns the package's folder."""
    source = folder / PACKAGE
    for name, text in {"__init__.py": "", **files}.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source


def test_accepts_a_sound_tree(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from outrider.entrypoints.llm import LLM",
        "__main__.py": "from outrider.entrypoints.cli import main",
        "config.py": "from outrider import __version__",
        "ops/hash.py": "import torch",
        "cache/__init__.py": "from outrider.cache.pool import Pool",
        "cache/pool.py": "from outrider.layers import norm\nfrom ..ops import hash",
        "layers/norm.py": "from outrider import ops",
        "engine/engine.py": "import outrider.cache.pool",
        "training/loop.py": "import outrider.spec_decode.metrics",
        "spec_decode/metrics.py": "",
        "entrypoints/llm.py": "from outrider.training import loop",
        "entrypoints/cli.py": "from outrider.entrypoints import llm",
        "vllm_plugin/plugin.py": "import vllm.config",
    }
    assert violations(write_tree(tmp_path, files)) == []


CHECKED_TYPE = "from typing import TYPE_CHECKING as T\nif T:\n    from ..cache import pool"
VIOLATIONS = {
    "upward": (
        {"ops/moe.py": "import outrider.cache.pool", "cache/pool.py": ""},
        "outrider.ops.moe:1 imports outrider.cache.pool: ops (up to L1) must not import L2",
    ),
    "upward inside a function": (
        {"config.py": "def f():\n    from outrider import engine", "engine/engine.py": ""},
        "outrider.config:2 imports outrider.engine: config (up to L0) must not import L5",
    ),
    "upward for a type, relative": (
        {"ops/moe.py": CHECKED_TYPE},
        "outrider.ops.moe:3 imports outrider.cache: ops (up to L1) must not import L2",
    ),
    "upward by name": (
        {"models/m.py": "import importlib\nimportlib.import_module('outrider.engine')"},
        "outrider.models.m:2 imports outrider.engine: models (up to L3) must not import L5",
    ),
    "side above its ceiling": (
        {"training/loop.py": "from outrider.engine import step"},
        "outrider.training.loop:1 imports outrider.engine: training (up to L4) must not import L5",
    ),
    "side from below the top": (
        {"engine/e.py": "import outrider.training"},
        "outrider.engine.e:1 imports outrider.training: only the top layer imports training",
    ),
    "side from a side": (
        {"vllm_plugin/q.py": "import outrider.training"},
        "outrider.vllm_plugin.q:1 imports outrider.training: only the top layer imports training",
    ),
    "from the package itself": (
        {"ops/moe.py": "from outrider import LLM"},
        "outrider.ops.moe:1 imports outrider: import from the module that defines the name, "
        "not from the package",
    ),
    "a request below the step": (
        {"sampling/s.py": "from outrider.request import Request", "request.py": ""},
        "outrider.sampling.s:1 imports outrider.request: L2 takes tensors and plain values, "
        "no requests",
    ),
    "unit without a layer": (
        {"helpers/a.py": ""},
        "outrider.helpers is in no layer; add it to the table",
    ),
    "vllm outside its plugin": (
        {"engine/e.py": "from vllm import LLM"},
        "outrider.engine.e:1 imports vllm: vllm is only for ('vllm_plugin',)",
    ),
    "transformers": (
        {"__init__.py": "import transformers.models"},
        "outrider:1 imports transformers.models: transformers is only for tests",
    ),
}


@pytest.mark.parametrize(("files", "expected"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_catches_a_violation(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    assert violations(write_tree(tmp_path, files)) == [expected]


def test_catches_a_circle_of_modules(tmp_path: Path) -> None:
    files = {"ops/a.py": "from outrider.ops.b import f", "ops/b.py": "from . import a"}
    (line,) = violations(write_tree(tmp_path, files))
    assert line.startswith("modules in a circle: ")


def test_catches_a_circle_of_siblings(tmp_path: Path) -> None:
    files = {
        "cache/a.py": "import outrider.layers.a",
        "cache/b.py": "",
        "layers/a.py": "",
        "layers/b.py": "import outrider.cache.b",
    }
    (line,) = violations(write_tree(tmp_path, files))
    assert line.startswith("units in a circle: ")
