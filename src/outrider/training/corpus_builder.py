"""Builds the bundled corpus: `python -m outrider.training.corpus_builder OUTPUT_DIR`.

Reads the recipe, fetches its packages, and writes train.jsonl, held_out_code.jsonl,
held_out_prose.jsonl, held_out_json.jsonl and provenance.json. The same recipe, with the same
interpreter, gives the same files byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import platform
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError, error_line
from outrider.training.archives import declared_licence, fetch, read_members
from outrider.training.corpus import collect_documents
from outrider.training.documents import Document, write_json_lines
from outrider.training.near_duplicates import PassageIndex, passages
from outrider.training.prompts import PROVENANCE_FILE, TRAIN_FILE, places_to_cut
from outrider.training.recipe import PERMISSIVE_LICENCES, STDLIB, SUITES, Recipe, Source
from outrider.training.text_checks import objection

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

RECIPE = Path("configs/corpus.toml")
# Which part of a text's passages may stand in texts that came before.
MAX_COPIED = 0.5
# Which part of a held-out text's passages may stand in any other text, and of a text to train on in
# held-out ones.
MAX_LEAKED = 0.1
# Files are looked at until this much of `max_bytes` is at hand: some are held out, some are copies.
_MAX_GATHERED = 1.6


@dataclass(eq=False)
class Candidate:
    """A file that passed the checks of its suite."""

    document: Document
    passages: set[int]


@dataclass(eq=False)
class Portion:
    """What one source gives to the corpus."""

    source: Source
    licence: str  # as its metadata says it
    archive: str = ""  # name and SHA-256 of the distribution's file
    sha256: str = ""
    candidates: list[Candidate] = field(default_factory=list)
    train: list[Candidate] = field(default_factory=list)
    held_out: list[Candidate] = field(default_factory=list)
    num_left_out: Counter[str] = field(default_factory=Counter)  # by reason

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry of provenance.json."""
        is_stdlib = self.source.kind == STDLIB
        return {
            "name": self.source.name,
            "version": platform.python_version() if is_stdlib else self.source.version,
            "kind": self.source.kind,
            "suite": self.source.suite,
            "licence": self.source.licence,
            "declared_licence": self.licence,
            "archive": self.archive,
            "sha256": self.sha256,
            **_size(self.train),
            "held_out": [candidate.document.source for candidate in self.held_out],
            "left_out": dict(sorted(self.num_left_out.items())),
        }


def gather(source: Source, cache: Path) -> Portion:
    """Reads the files of a source and keeps those without objection."""
    if source.kind == STDLIB:
        portion = Portion(source, source.licence)
        portion.candidates = _candidates(collect_documents(), source.suite)
        portion.held_out = _candidates(collect_documents(held_out=True), source.suite)
        return portion
    archive = fetch(source, cache)
    portion = Portion(source, declared_licence(archive, source), archive.name)
    portion.sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    check_licence(source, portion.licence)
    files = [(f"{source.label}/{path}", data) for path, data in read_members(archive, source)]
    # Neither the alphabet nor the archive decides which files are taken.
    files.sort(key=lambda file: hashlib.sha256(file[0].encode()).digest())
    documents: list[Document] = []
    num_bytes = 0
    for name, data in files:
        if num_bytes > _MAX_GATHERED * source.max_bytes:
            portion.num_left_out["over max_bytes"] += 1
            continue
        text = data.decode(errors="replace").replace("\r\n", "\n").removeprefix("\ufeff")
        reason = objection(text, source.suite)
        if reason is None:
            documents.append(Document(name, text))
            num_bytes += len(data)
        else:
            portion.num_left_out[reason] += 1
    portion.candidates = _candidates(documents, source.suite)
    return portion


def check_licence(source: Source, declared: str) -> None:
    """Raises an OutriderError where a package's metadata does not say what the recipe says.

    An SPDX expression has to be the same; a name in words, such as "BSD License", has to be of the
    family.
    """
    family = source.licence.split("-")[0].split(" ")[0]
    agrees = declared == source.licence
    if declared not in PERMISSIVE_LICENCES:
        agrees = family in declared and "GPL" not in declared and "MPL" not in declared
    if not agrees:
        raise OutriderError(
            f"{source.label}: the recipe says {source.licence}, its metadata {declared!r}"
        )


def divide(portions: list[Portion]) -> None:
    """Fills `held_out` and `train` of all portions from their candidates."""
    everything = PassageIndex()
    for portion in portions:
        for candidate in [*portion.candidates, *portion.held_out]:
            everything.add(candidate.passages)
    for portion in portions:
        _hold_out(portion, everything)
    held_out, seen = PassageIndex(), PassageIndex()
    for portion in portions:
        for candidate in portion.held_out:
            held_out.add(candidate.passages)
    for portion in portions:
        _fill_train(portion, held_out, seen)


def build(recipe: Recipe, cache: Path) -> list[Portion]:
    """Gathers and divides all sources."""
    portions = []
    for source in recipe.sources:
        portion = gather(source, cache)
        logger.info(
            "%s %s: %d files, left out %s",
            source.label,
            source.suite,
            len(portion.candidates),
            dict(portion.num_left_out),
        )
        portions.append(portion)
    divide(portions)
    return portions


def provenance(portions: list[Portion]) -> dict[str, Any]:
    """Returns what provenance.json holds: totals of each suite, then every source."""
    suites = {}
    for suite in SUITES:
        train, held_out = (
            [c for p in portions if p.source.suite == suite for c in getattr(p, kind)]
            for kind in ("train", "held_out")
        )
        index = PassageIndex()
        for candidate in train:
            index.add(candidate.passages)
        found = {passage for candidate in held_out for passage in candidate.passages}
        suites[suite] = {
            "train": _size(train),
            "held_out": _size(held_out),
            "held_out_passages_in_train": round(index.shared_fraction(found), 4),
        }
    return {
        "python": platform.python_version(),
        "suites": suites,
        "sources": [portion.to_dict() for portion in portions],
    }


def write(portions: list[Portion], output_dir: Path) -> dict[str, Any]:
    """Writes the corpus; returns what provenance.json holds."""
    output_dir.mkdir(parents=True, exist_ok=True)
    train = [candidate.document for portion in portions for candidate in portion.train]
    write_json_lines(output_dir / TRAIN_FILE, train)
    for suite in SUITES:
        held_out = [
            candidate.document
            for portion in portions
            if portion.source.suite == suite
            for candidate in portion.held_out
        ]
        write_json_lines(output_dir / f"held_out_{suite}.jsonl", held_out)
    content = provenance(portions)
    text = json.dumps(content, indent=2) + "\n"
    (output_dir / PROVENANCE_FILE).write_text(text, encoding="utf-8")
    return content


def _candidates(documents: list[Document], suite: str) -> list[Candidate]:
    return [Candidate(document, passages(document.text, suite)) for document in documents]


def _hold_out(portion: Portion, everything: PassageIndex) -> None:
    """Takes the first files that stand nowhere else and that two prompts can be cut from."""
    wanted = len(portion.held_out) + portion.source.num_held_out
    kept = []
    for candidate in portion.candidates:
        if (
            len(portion.held_out) < wanted
            and everything.shared_fraction(candidate.passages, own=1) <= MAX_LEAKED
            and len(places_to_cut(candidate.document.text, portion.source.suite)) > 1
        ):
            portion.held_out.append(candidate)
        else:
            kept.append(candidate)
    if len(portion.held_out) < wanted:
        raise OutriderError(
            f"{portion.source.label}: num_held_out: {portion.source.num_held_out} files to hold "
            "out are more than stand nowhere else and are long enough"
        )
    portion.candidates = kept


def _fill_train(portion: Portion, held_out: PassageIndex, seen: PassageIndex) -> None:
    num_bytes = 0
    for candidate in portion.candidates:
        size = len(candidate.document.text.encode())
        if held_out.shared_fraction(candidate.passages) > MAX_LEAKED:
            portion.num_left_out["held out elsewhere"] += 1
        elif seen.shared_fraction(candidate.passages) > MAX_COPIED:
            portion.num_left_out["copy"] += 1
        elif portion.source.kind != STDLIB and num_bytes + size > portion.source.max_bytes:
            portion.num_left_out["over max_bytes"] += 1
        else:
            portion.train.append(candidate)
            seen.add(candidate.passages)
            num_bytes += size


def _size(candidates: list[Candidate]) -> dict[str, int]:
    return {
        "documents": len(candidates),
        "bytes": sum(len(candidate.document.text.encode()) for candidate in candidates),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the corpus and prints its size; returns the exit code.

    Args:
        arguments: of the command line; None is those of the process.
    """
    parser = argparse.ArgumentParser(description="Builds the corpus and prints its size.")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        recipe = Recipe.from_toml(given.recipe)
        portions = build(recipe, given.output_dir / "packages")
        content = write(portions, given.output_dir)
    except (OSError, OutriderError) as error:
        sys.stderr.write(error_line(error, given.output_dir))
        return 2
    logger.info("%s", json.dumps(content["suites"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
