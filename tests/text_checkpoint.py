"""A tiny random checkpoint that reads and writes text: the bundled tokenizer, other weights."""

import shutil
from pathlib import Path

import torch

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.models.qwen4_exp.weights import save_checkpoint
from tests.models.tiny_checkpoint import random_model, tiny_config
from tests.tiny_engine import tiny_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_text_checkpoint(folder: Path) -> Path:
    """Writes every kind of block and a head whose drafts are hardly ever accepted."""
    torch.manual_seed(0)
    config = tiny_config(vocab_size=4096, max_position_embeddings=256, eos_token_id=0)
    save_checkpoint(random_model(config), config, folder, torch.float32)
    copy_tokenizer(folder)
    return folder


def write_guessing_checkpoint(folder: Path) -> Path:
    """Writes every kind of block and a head of whose first drafts every fourth is accepted."""
    # Among 4,096 ids a head of this size guesses only what follows closely from the last token.
    model = tiny_model(torch.float32, trunk_scale=0.2, vocab_size=4096, eos_token_id=0)
    save_checkpoint(model, model.config, folder, torch.float32)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Gives a checkpoint of 4,096 ids the bundled tokenizer."""
    for name in TOKENIZER_FILES:
        shutil.copy(BUNDLED_MODEL_DIR / name, folder)
