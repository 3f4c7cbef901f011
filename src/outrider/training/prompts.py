"""The bundled prompts: held-out Python cut in mid-function, for checks and measurements.

Runs once: `python -m outrider.training.prompts OUTPUT_DIR`, where OUTPUT_DIR holds tokenizer.json.
"""

from __future__ import annotations

import argparse
import ast
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from outrider.training.corpus import collect_documents

if TYPE_CHECKING:
    from outrider.training.documents import Document

PROMPTS_FILE = "prompts.jsonl"
MIN_TOKENS = 64
MAX_TOKENS = 200
_MAX_PER_MODULE = 6
_SEED = 20240
# A function shorter than this has no middle.
_MIN_FUNCTION_LINES = 8


@dataclass(frozen=True)
class Prompt:
    """One line of the file."""

    prompt: str
    source: str  # the held-out module it was cut from


def make_prompts(tokenizer: Tokenizer, documents: list[Document]) -> list[Prompt]:
    """Cuts up to six prompts a document, each out of another function, in an order that is fixed.

    A prompt ends inside a function's body at a border between two tokens, in mid-line as a rule,
    and starts at a line, `MIN_TOKENS` to `MAX_TOKENS` earlier.
    """
    rng = np.random.default_rng(_SEED)
    prompts: list[Prompt] = []
    for document in documents:
        functions = _functions(document.text)
        chosen = rng.permutation(len(functions))
        texts: list[str] = []
        for index in chosen:
            if len(texts) == _MAX_PER_MODULE:
                break
            text = _cut(tokenizer, document.text, functions[index], rng)
            if text is not None:
                texts.append(text)
        prompts.extend(Prompt(text, document.source) for text in texts)
    return prompts


def load_prompts(path: Path) -> list[Prompt]:
    """Reads a file of prompts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]


def _functions(text: str) -> list[tuple[int, int]]:
    """Returns first and last line, 0-based and inclusive, of every body that is long enough."""
    spans = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first, last = node.body[0].lineno - 1, node.end_lineno - 1
            if last - first + 1 >= _MIN_FUNCTION_LINES:
                spans.append((first, last))
    return sorted(spans)


def _cut(
    tokenizer: Tokenizer, text: str, function: tuple[int, int], rng: np.random.Generator
) -> str | None:
    lines = text.splitlines(keepends=True)
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


def main() -> None:
    """Cuts the prompts and writes the file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("output_dir", type=Path)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.output_dir / "tokenizer.json"))
    prompts = make_prompts(tokenizer, collect_documents(held_out=True))
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) for prompt in prompts]
    (arguments.output_dir / PROMPTS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
