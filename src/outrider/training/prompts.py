"""Prompts: text cut in the middle, held out for measurements, or for a head to be tuned to.

Runs in three forms, over FOLDER, which holds tokenizer.json. `python -m outrider.training.prompts
FOLDER` cuts FOLDER/prompts.jsonl from the standard library's held-out modules. With
`--corpus CORPUS_DIR`, what `corpus_builder` wrote, it cuts FOLDER/suites/*.jsonl from the held-out
files. With `--workload FILE` too, it cuts FILE instead, from the text that was trained on: a head
is tuned to it where the suites are to stay held out.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from outrider.errors import OutriderError, error_line
from outrider.json_file import read_json_object
from outrider.training.corpus import collect_documents, load_tokenizer
from outrider.training.documents import read_documents
from outrider.training.text_checks import parse_python

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tokenizers

    from outrider.training.documents import Document

AnyPrompt = TypeVar("AnyPrompt")

PROMPTS_FILE = "prompts.jsonl"
TRAIN_FILE = "train.jsonl"  # of a corpus
PROVENANCE_FILE = "provenance.json"
MIN_TOKENS = 64
MAX_TOKENS = 200
_MAX_PER_MODULE = 6
SUITES_FOLDER = "suites"
MAX_PER_DOCUMENT = 2  # in the suites and the workload
_MAX_PROMPTS = {"code": 300, "prose": 140, "json": 140}
_WORKLOAD_SHARES = {"code": 0.7, "prose": 0.2, "json": 0.1}
_SEED = 20240
# A function shorter than this has no middle.
_MIN_FUNCTION_LINES = 8
# Of other text: half a document that is shorter has no middle.
_MIN_SECTION_LINES = 24

_ORIGINS = """\
# Suites of held-out prompts

Excerpts of the packages below, under their licences; `source` in each line names the file. None of
these files is part of the text that the bundled checkpoint is trained on. Written by
`python -m outrider.training.prompts`, like the files beside it.

| suite | package | licence | files |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Prompt:
    """One line of the file."""

    prompt: str
    source: str  # the file it was cut from


def make_prompts(
    tokenizer: tokenizers.Tokenizer,
    documents: list[Document],
    *,
    suite: str = "code",
    max_per_document: int = _MAX_PER_MODULE,
) -> list[Prompt]:
    """Cuts prompts, each out of another function or section, in an order that is fixed.

    A prompt ends inside a function's body, or in the middle of a section, at a border between two
    tokens, in mid-line as a rule, and starts at a line, `MIN_TOKENS` to `MAX_TOKENS` earlier.

    Args:
        tokenizer: whose tokens are counted.
        documents: to cut from.
        suite: "code" for Python; others are cut anywhere.
        max_per_document: prompts of one document at most.
    """
    rng = np.random.default_rng(_SEED)
    prompts: list[Prompt] = []
    for document in documents:
        places = places_to_cut(document.text, suite)
        chosen = rng.permutation(len(places))
        texts: list[str] = []
        for index in chosen:
            if len(texts) == max_per_document:
                break
            text = _cut(tokenizer, document.text, places[index], rng)
            if text is not None and text not in texts:
                texts.append(text)
        prompts.extend(Prompt(text, document.source) for text in texts)
    return prompts


def places_to_cut(text: str, suite: str) -> list[tuple[int, int]]:
    """Returns first and last line, 0-based and inclusive, of what a prompt may end in.

    These are the functions' bodies of Python, and the two halves of any other text.
    """
    if suite == "code":
        return _functions(text)
    num_lines = text.count("\n")
    if num_lines < 2 * _MIN_SECTION_LINES:
        return []
    return [(0, num_lines // 2 - 1), (num_lines // 2, num_lines - 1)]


def _functions(text: str) -> list[tuple[int, int]]:
    """Returns first and last line, 0-based and inclusive, of every body that is long enough.

    A text that is Python of another version has none, so that no prompt is cut from it.
    """
    spans: list[tuple[int, int]] = []
    tree = parse_python(text)
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first, last = node.body[0].lineno - 1, node.end_lineno - 1
            if last - first + 1 >= _MIN_FUNCTION_LINES:
                spans.append((first, last))
    return sorted(spans)


def _cut(
    tokenizer: tokenizers.Tokenizer, text: str, function: tuple[int, int], rng: np.random.Generator
) -> str | None:
    # Not splitlines(): the lines that Python counts end in a line feed alone.
    lines = [f"{line}\n" for line in text.split("\n")]
    first, last = function
    # The middle half of the body: neither right after the signature nor at its last line.
    quarter = max(1, (last - first + 1) // 4)
    cut_line = int(rng.integers(first + quarter, last - quarter + 1))
    before = "".join(lines[:cut_line])
    offsets = tokenizer.encode(lines[cut_line].rstrip("\n"), add_special_tokens=False).offsets
    num_kept = int(rng.integers(len(offsets))) if offsets else 0
    prefix = before + lines[cut_line][: offsets[num_kept][0] if offsets else 0]
    num_tokens = int(rng.integers(MIN_TOKENS + 16, MAX_TOKENS + 1))
    starts = tokenizer.encode(prefix, add_special_tokens=False).offsets
    start = starts[max(0, len(starts) - num_tokens)][0]
    if start > 0:
        start = prefix.find("\n", start - 1) + 1
    prompt = prefix[start:]
    length = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    return prompt if MIN_TOKENS <= length <= MAX_TOKENS else None


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    """Writes a file of prompts, one a line."""
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")


def write_suites(tokenizer: tokenizers.Tokenizer, corpus_dir: Path, output_dir: Path) -> None:
    """Cuts the suites from the held-out files of a corpus, and writes where they are from."""
    cut: dict[str, list[Prompt]] = {}
    for suite, max_prompts in _MAX_PROMPTS.items():
        path = corpus_dir / f"held_out_{suite}.jsonl"
        prompts = make_prompts(
            tokenizer,
            read_documents("--corpus", (path,), ()),
            suite=suite,
            max_per_document=MAX_PER_DOCUMENT,
        )
        # Of fewer prompts than there are, the files still come from every package.
        cut[suite] = spread_evenly(prompts, max_prompts)
    page = _origins(corpus_dir / PROVENANCE_FILE, cut)
    output_dir.mkdir(parents=True, exist_ok=True)
    for suite, prompts in cut.items():
        write_prompts(output_dir / f"{suite}.jsonl", prompts)
    (output_dir / "README.md").write_text(page, encoding="utf-8")


def write_workload(
    tokenizer: tokenizers.Tokenizer, corpus_dir: Path, path: Path, num_prompts: int = 1600
) -> None:
    """Cuts prompts of all suites from the text that a corpus gives to training.

    Args:
        tokenizer: whose tokens are counted.
        corpus_dir: with train.jsonl.
        path: of the file to write.
        num_prompts: about so many, where there is text for them.
    """
    documents = read_documents("--corpus", (corpus_dir / TRAIN_FILE,), ())
    prompts: list[Prompt] = []
    for suite, share in _WORKLOAD_SHARES.items():
        of_suite = [document for document in documents if _suite_of(document) == suite]
        cut = make_prompts(tokenizer, of_suite, suite=suite, max_per_document=MAX_PER_DOCUMENT)
        prompts.extend(spread_evenly(cut, round(share * num_prompts)))
    write_prompts(path, prompts)


def _suite_of(document: Document) -> str:
    suffix = document.source.rsplit(".", 1)[-1]
    return {"py": "code", "json": "json"}.get(suffix, "prose")


def spread_evenly(prompts: Sequence[AnyPrompt], max_prompts: int) -> list[AnyPrompt]:
    """At most so many, at even distances from the first on; neighbours in a file are alike."""
    num_prompts = len(prompts)
    if num_prompts <= max_prompts:
        return list(prompts)
    return [prompts[i * num_prompts // max_prompts] for i in range(max_prompts)]


def _origins(path: Path, cut: dict[str, list[Prompt]]) -> str:
    """Returns a page that names package, version and licence of every excerpt.

    Args:
        path: of the corpus's provenance.
        cut: the prompts of each suite.
    """
    provenance = read_json_object(path)
    used = {suite: {prompt.source for prompt in prompts} for suite, prompts in cut.items()}
    rows = []
    try:
        for entry in provenance["sources"]:
            num_files = len(used[entry["suite"]].intersection(entry["held_out"]))
            if num_files:
                package = f"{entry['name']} {entry['version']}"
                rows.append(f"| {entry['suite']} | {package} | {entry['licence']} | {num_files} |")
    except KeyError as error:
        raise OutriderError(f"{path}: {error} is missing, or unknown as a suite") from None
    except TypeError as error:
        raise OutriderError(f"{path}: not what a corpus has: {error}") from None
    return _ORIGINS + "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Cuts the prompts and writes the files; returns the exit code.

    Args:
        arguments: of the command line; None is those of the process.
    """
    parser = argparse.ArgumentParser(description="Cuts prompts and writes the files.")
    parser.add_argument("folder", type=Path, help="with tokenizer.json")
    parser.add_argument("--corpus", type=Path, help="cut the suites from this corpus instead")
    parser.add_argument("--workload", type=Path, help="cut this file from what it trains on")
    given = parser.parse_args(arguments)
    if given.workload is not None and given.corpus is None:
        parser.error("--workload: needs --corpus")
    try:
        tokenizer = load_tokenizer(given.folder)
        if given.corpus is None:
            prompts = make_prompts(tokenizer, collect_documents(held_out=True))
            write_prompts(given.folder / PROMPTS_FILE, prompts)
        elif given.workload is not None:
            write_workload(tokenizer, given.corpus, given.workload)
        else:
            write_suites(tokenizer, given.corpus, given.folder / SUITES_FOLDER)
    except (OSError, OutriderError) as error:
        sys.stderr.write(error_line(error, given.workload or given.folder))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
