"""The recipe of the bundled corpus: which files of which packages, read from configs/corpus.toml.

Strict, since what it names is published with the weights: an unknown key, a licence that is not on
the list, and a package whose own metadata names another licence are errors.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SUITES = ("code", "prose", "json")
# What may be copied and passed on under little more than naming the author; SPDX identifiers.
PERMISSIVE_LICENCES = (
    "Apache-2.0",
    "Apache-2.0 AND MIT",
    "Apache-2.0 OR BSD-2-Clause",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT OR Apache-2.0",
    "PSF-2.0",
)
KINDS = ("sdist", "wheel", "npm", "stdlib")
STDLIB = "stdlib"


@dataclass(frozen=True)
class Source:
    """Files of one kind of text in one distribution."""

    name: str  # as the registry knows it
    kind: str  # one of KINDS: what is fetched
    licence: str  # one of PERMISSIVE_LICENCES
    suite: str  # one of SUITES
    version: str = ""  # exact; the standard library alone has none, it is the interpreter's
    # Globs of paths within the distribution, its top folder left out. A star matches slashes too.
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_bytes: int = 2_000_000  # of text to train on, files in the order of a hash of their names
    num_held_out: int = 0  # files that are kept apart, beside HELD_OUT_MODULES

    def __post_init__(self) -> None:
        """Checks the fields against what is known."""
        for name, known in (("kind", KINDS), ("licence", PERMISSIVE_LICENCES), ("suite", SUITES)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{self.name}: {name} {value!r} is none of {', '.join(known)}")
        is_stdlib = self.kind == STDLIB
        if is_stdlib == bool(self.version) or is_stdlib == bool(self.include):
            raise ConfigError(
                f"{self.name}: version and include are needed, but for the standard library, "
                "which has neither"
            )

    @property
    def label(self) -> str:
        """Name and version, the first part of the source of each of its documents."""
        return f"{self.name}-{self.version}"

    def matches(self, path: str) -> bool:
        """Whether a file of the distribution belongs to it."""
        return any(fnmatchcase(path, glob) for glob in self.include) and not any(
            fnmatchcase(path, glob) for glob in self.exclude
        )


@dataclass(frozen=True)
class Recipe:
    """What the corpus is made of."""

    sources: tuple[Source, ...]

    @classmethod
    def from_toml(cls, path: Path) -> Recipe:
        """Reads tables named `source` and lists `exclude_code`, `exclude_prose`, `exclude_json`.

        Such a list is added to the `exclude` of every source of its suite.
        """
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not TOML ({error})") from error
        shared = {suite: tuple(content.pop(f"exclude_{suite}", ())) for suite in SUITES}
        tables = content.pop("source", [])
        if content or not tables:
            found = ", ".join(content) or "no source"
            raise ConfigError(f"{path}: {found}; tables named source are expected")
        return cls(tuple(_source(path, table, shared) for table in tables))


def _source(path: Path, table: dict[str, Any], shared: dict[str, tuple[str, ...]]) -> Source:
    known = {field.name for field in fields(Source)}
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; known are {', '.join(sorted(known))}")
    lists = {key: tuple(table.get(key, ())) for key in ("include", "exclude")}
    lists["exclude"] += shared.get(table.get("suite", ""), ())
    try:
        return Source(**{**table, **lists})
    except TypeError as error:
        raise ConfigError(f"{path}: {table.get('name', 'a source')}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
