"""The bundled tokenizer, which is that of the compiler."""

import pytest

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(BUNDLED_MODEL_DIR)
