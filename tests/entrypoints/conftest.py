"""A tiny checkpoint on disk with the bundled tokenizer, and one that a test may change."""

import shutil
from pathlib import Path

import pytest

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.entrypoints.llm import LLM
from outrider.tokenizer import Tokenizer
from tests.text_checkpoint import write_text_checkpoint


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def own_model_dir(model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may change."""
    return Path(shutil.copytree(model_dir, tmp_path / "own"))


@pytest.fixture(scope="session")
def llm(model_dir: Path) -> LLM:
    """With drafts; every test leaves it without requests."""
    return LLM(model_dir, speculative_config={"method": "mtp", "num_speculative_tokens": 3})


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(BUNDLED_MODEL_DIR)
