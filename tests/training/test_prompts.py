"""Facts about the bundled prompts."""

from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer

from outrider.training.corpus import HELD_OUT_MODULES, collect_documents
from outrider.training.prompts import (
    MAX_TOKENS,
    MIN_TOKENS,
    PROMPTS_FILE,
    load_prompts,
    make_prompts,
)

BUNDLED = Path(__file__).parents[2] / "src" / "outrider" / "bundled"


def test_prompts_are_many_spread_and_of_the_stated_length() -> None:
    prompts = load_prompts(BUNDLED / PROMPTS_FILE)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    assert len(prompts) >= 128
    assert len({prompt.prompt for prompt in prompts}) == len(prompts)
    counts = Counter(prompt.source for prompt in prompts)
    assert counts.keys() == HELD_OUT_MODULES
    assert max(counts.values()) <= 8
    for prompt in prompts:
        assert MIN_TOKENS <= len(tokenizer.encode(prompt.prompt).ids) <= MAX_TOKENS


def test_cutting_is_deterministic_and_quotes_the_source() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    documents = collect_documents(held_out=True)[:3]
    prompts = make_prompts(tokenizer, documents)
    assert prompts == make_prompts(tokenizer, documents)
    texts = {document.source: document.text for document in documents}
    for prompt in prompts:
        start = texts[prompt.source].index(prompt.prompt)
        assert start == 0 or texts[prompt.source][start - 1] == "\n"
