"""What a run starts from: its model, its first weights, its trunk alone; and what it refuses."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from outrider.errors import OutriderError
from outrider.models.qwen4_exp.weights import has_mtp, load_model
from outrider.training import train as train_module
from outrider.training.config import TrainConfig
from outrider.training.run_log import read_log
from outrider.training.train import make_trainer, run_to_the_end
from tests.training.tiny_run import ROWS_PER_STEP, write_run


def run(path: Path) -> Path:
    """Runs a configuration to its end; returns the export."""
    config = TrainConfig.from_toml(path)
    export_dir = run_to_the_end(make_trainer(config), config)
    assert export_dir is not None
    return export_dir


def test_a_run_starts_from_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    export_dir = run(write_run(tmp_path, "first"))
    path = write_run(tmp_path, "second", **{"run.init_from": str(export_dir), "run.seed": 9})
    trainer = make_trainer(TrainConfig.from_toml(path))
    expected = load_model(export_dir)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    assert trainer.progress.step == 0, "the optimiser starts fresh"
    first_loss = trainer.step()[0].trunk.item()
    trained = read_log(tmp_path / "first" / "log.jsonl")[-2]
    assert first_loss == pytest.approx(trained["trunk"], abs=0.2)
    trainer.save()
    # A checkpoint of the run itself counts more than where it began, which may be gone.
    shutil.rmtree(export_dir)
    again = make_trainer(TrainConfig.from_toml(path))
    assert again.progress.step == 1
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter, trainer.model.get_parameter(name)), name


def test_the_trunk_alone_is_trained_exported_and_given_a_head(tmp_path: Path) -> None:
    short = {"schedule.max_tokens": 3 * ROWS_PER_STEP}
    alone = write_run(tmp_path, "alone", **short, **{"loss.mtp_weight": 0})
    joint = make_trainer(TrainConfig.from_toml(write_run(tmp_path, "joint"))).model
    model = make_trainer(TrainConfig.from_toml(alone)).model
    assert model.mtp is None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, joint.get_parameter(name)), "the pair starts alike"
    export_dir = run(alone)
    records = read_log(tmp_path / "alone" / "log.jsonl")
    assert all(record["depths"] == [] for record in records if record["kind"] == "train")
    assert records[-1]["chained_acceptance_length"] is None
    assert not has_mtp(export_dir)
    assert load_model(export_dir).mtp is None
    # Training goes on from it with a head, which is then made anew.
    path = write_run(tmp_path, "headed", **{"run.init_from": str(export_dir)})
    headed = make_trainer(TrainConfig.from_toml(path))
    trunk = load_model(export_dir)
    for name, parameter in headed.model.named_parameters():
        owner = joint if name.startswith("mtp.") else trunk
        assert torch.equal(parameter, owner.get_parameter(name)), name
    headed.step()


def test_a_run_that_is_over_is_exported_again(tmp_path: Path) -> None:
    path = write_run(tmp_path, **{"schedule.max_tokens": 2 * ROWS_PER_STEP})
    export_dir = run(path)
    before = (export_dir / "model.safetensors").read_bytes()
    (export_dir / "model.safetensors").unlink()
    assert run(path) == export_dir
    assert (export_dir / "model.safetensors").read_bytes() == before


def test_a_missing_plot_library_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(train_module, "_PLOT_LIBRARY", "no_such_library")
    path = write_run(tmp_path, **{"schedule.max_tokens": ROWS_PER_STEP})
    with caplog.at_level(logging.INFO, "outrider"):
        run(path)
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == ["no loss plot: no_such_library is missing; pip install 'outrider[train]'"]
    assert not (tmp_path / "out" / "loss.png").exists()


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    run(write_run(tmp_path, **{"schedule.max_tokens": ROWS_PER_STEP}))
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def edit_model_config(folder: Path, **fields: object) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_first_weights_of_another_configuration_are_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, "first", **{"schedule.max_tokens": ROWS_PER_STEP})
    export_dir = run(path)
    edit_model_config(tmp_path, num_experts_per_tok=3)
    path = write_run(tmp_path, "second", **{"run.init_from": str(export_dir)})
    with pytest.raises(
        OutriderError, match=r"run\.init_from: .*export/config\.json has num_experts_per_tok 2, "
    ):
        make_trainer(TrainConfig.from_toml(path))
    path = write_run(tmp_path, "third", **{"run.init_from": str(tmp_path / "absent")})
    with pytest.raises(OutriderError, match=r"absent.*"):
        make_trainer(TrainConfig.from_toml(path))


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"data.sequence_length": 65}, "65 is above the model's max_position_embeddings, 64"),
        (
            {},
            {"data.sequence_length": 2, "loss.depth_weights": [1.0]},
            "2 is below the model's ngram_size, 3",
        ),
        ({"mtp_num_hidden_layers": 0}, {}, "no head to train: set it to 1, or loss.mtp_weight"),
        ({"vocab_size": 4000}, {}, "has 4096 entries, but vocab_size in config.json is 4000"),
        ({}, {"run.device": "abacus"}, "'abacus' is no device of this machine"),
        ({}, {"run.device": "cuda:77"}, "'cuda:77' is no device of this machine"),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    tmp_path: Path, fields: dict[str, object], options: dict[str, object], message: str
) -> None:
    path = write_run(tmp_path, **options)
    edit_model_config(tmp_path, **fields)
    with pytest.raises(OutriderError, match=message):
        make_trainer(TrainConfig.from_toml(path))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run(write_run(tmp_path, **{"schedule.max_tokens": ROWS_PER_STEP}))
    path = write_run(tmp_path, **{"loss.mtp_weight": 0.0})
    with pytest.raises(
        OutriderError,
        match=r"step-00000001: not a checkpoint of this run \(mtp\.\S+ is .*none of that name\)",
    ):
        make_trainer(TrainConfig.from_toml(path))
