"""A checkpoint that does not fit into memory is refused before anything is allocated."""

from pathlib import Path

import pytest
import torch

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp import weights
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.models.qwen4_exp.weights import load_model, save_checkpoint
from tests.models.tiny_checkpoint import edit_json, random_model, tiny_config

Checkpoint = tuple[Path, Qwen4ExpForCausalLM]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    config = tiny_config()
    model = random_model(config)
    save_checkpoint(model, config, tmp_path / "tiny", torch.float32)
    return tmp_path / "tiny", model


def test_refuses_what_does_not_fit_before_allocating(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, _ = checkpoint
    monkeypatch.setattr(weights, "available_memory", lambda device: 50_000)
    monkeypatch.setattr(weights, "_replace_parameters", lambda *_: pytest.fail("allocated"))
    phrase = r"weights need \d\d\d\.\d KiB in float64, but 48\.8 KiB are available on cpu"
    with pytest.raises(CheckpointError, match=phrase):
        load_model(model_dir, dtype=torch.float64)


def test_sizes_beyond_64_bits_are_one_line(checkpoint: Checkpoint) -> None:
    model_dir, _ = checkpoint
    edit_json(model_dir / "config.json", lambda config: config.update(hc_count=1 << 40))
    with pytest.raises(CheckpointError, match=r"config\.json: Storage size calculation overflowed"):
        load_model(model_dir)


def test_more_positions_than_memory_are_one_line(checkpoint: Checkpoint) -> None:
    model_dir, _ = checkpoint
    edit_json(
        model_dir / "config.json", lambda config: config.update(max_position_embeddings=1 << 40)
    )
    with pytest.raises(CheckpointError, match=r"the angles of 1099511627776 positions need \d+"):
        load_model(model_dir)
    assert load_model(model_dir, max_positions=64).rotary.max_positions == 64


def test_the_rotary_table_is_no_longer_than_the_checkpoint(checkpoint: Checkpoint) -> None:
    model_dir, model = checkpoint
    loaded = load_model(model_dir, max_positions=10**15)
    assert loaded.rotary.max_positions == model.rotary.max_positions
