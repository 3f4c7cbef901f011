"""A tiny checkpoint on disk with the bundled tokenizer, and one that a test may change."""

import shutil
from pathlib import Path

import pytest
import torch

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.entrypoints.llm import LLM
from outrider.models.qwen4_exp.weights import save_checkpoint
from outrider.tokenizer import Tokenizer
from tests.models.tiny_checkpoint import random_model, tiny_config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with every kind of block, whose head's drafts are hardly ever accepted."""
    torch.manual_seed(0)
    config = tiny_config(vocab_size=4096, max_position_embeddings=256, eos_token_id=0)
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_checkpoint(random_model(config), config, folder, torch.float32)
    for name in TOKENIZER_FILES:
        shutil.copy(BUNDLED_MODEL_DIR / name, folder)
    return folder


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
