"""A compiler over the bundled tokenizer, whose process is started once."""

from collections.abc import Iterator

import pytest

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.grammar.compiler import GrammarCompiler
from outrider.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(BUNDLED_MODEL_DIR)


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, tokenizer.num_tokens, tokenizer.eos_token_ids)
    yield compiler
    compiler.close()
