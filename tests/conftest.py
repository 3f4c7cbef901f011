"""What every test starts from: fixed seeds, the same examples, one thread, one compiler."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.grammar.compiler import GrammarCompiler
from outrider.tokenizer import Tokenizer

# The same examples every time, and no time limit for one: a busy machine is no defect.
settings.register_profile("outrider", derandomize=True, deadline=None)
settings.load_profile("outrider")

# Library kernels may sum in another order when the number of threads changes.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds the global generators, so that no test depends on those that ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    """Over the bundled tokenizer; its process takes seconds to start, and starts once."""
    tokenizer = Tokenizer.from_pretrained(BUNDLED_MODEL_DIR)
    compiler = GrammarCompiler(tokenizer, tokenizer.num_tokens, tokenizer.eos_token_ids)
    yield compiler
    compiler.close()
