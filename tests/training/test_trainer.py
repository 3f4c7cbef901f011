"""The optimiser loop on a tiny model: it learns, stops at its budget, and resumes to the bit."""

import dataclasses
import json
import math
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import OutriderError
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.models.qwen4_exp.weights import load_model
from outrider.training import checkpoint as checkpoint_module
from outrider.training import mtp_loss
from outrider.training.config import DataConfig, LossConfig, RunConfig, ScheduleConfig, TrainConfig
from outrider.training.corpus import TokenArray
from outrider.training.evaluation import evaluation_windows
from outrider.training.objective import joint_loss, predict
from outrider.training.run_log import read_log
from outrider.training.schedule import Progress
from outrider.training.trainer import Trainer, make_optimizer
from tests.training.tiny_run import tiny_config, untrained

BUNDLED = Path(__file__).parents[2] / "src" / "outrider" / "bundled"
VOCAB_SIZE = 64
NUM_STEPS = 6


def tiny_model(seed: int = 0) -> Qwen4ExpForCausalLM:
    return untrained(tiny_config(VOCAB_SIZE), seed)


def tiny_run(output_dir: Path, **changes: object) -> TrainConfig:
    config = TrainConfig(
        run=RunConfig(
            model_dir=BUNDLED,
            output_dir=output_dir,
            log_every_steps=1,
            eval_every_steps=100,
            num_eval_windows=2,
        ),
        data=DataConfig(sequence_length=24, batch_size=2),
        schedule=ScheduleConfig(max_tokens=NUM_STEPS * 48, warmup_steps=2),
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def tiny_tokens(seed: int) -> TokenArray:
    """Text that is easy to learn: a cycle of ids with a few slips."""
    rng = np.random.default_rng(seed)
    ids = np.arange(600) % 7 + 1
    slips = rng.random(600) < 0.05
    ids[slips] = rng.integers(1, VOCAB_SIZE, slips.sum())
    return TokenArray(
        ids.astype(np.uint16),
        num_bytes=1200,
        num_documents=1,
        bytes_per_id=np.arange(VOCAB_SIZE) % 3 + 1,
    )


def tiny_trainer(config: TrainConfig, seed: int = 0) -> Trainer:
    return Trainer(
        tiny_model(seed), config, train_tokens=tiny_tokens(1), held_out_tokens=tiny_tokens(2)
    )


def test_the_loss_falls_and_the_log_tells(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, schedule=ScheduleConfig(max_tokens=60 * 48, warmup_steps=5))
    trainer = tiny_trainer(config)
    assert trainer.train()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == list(range(1, 61))
    assert train[0]["trunk"] == pytest.approx(np.log(VOCAB_SIZE), abs=0.1)
    assert train[-1]["trunk"] < 3.2
    assert len(train[-1]["depths"]) == 3
    assert all(loss < 3.6 for loss in train[-1]["depths"])
    assert records[-1]["kind"] == "eval"
    evaluation = trainer.evaluate()
    assert records[-1]["bits_per_byte"] == pytest.approx(evaluation.bits_per_byte, rel=1e-3)
    # The bytes are those of the targets in the windows, not the corpus' mean.
    windows = evaluation_windows(tiny_tokens(2), 24, 2)
    num_bytes = (windows[:, 1:-1] % 3 + 1).double().mean().item()
    assert evaluation.bits_per_byte == pytest.approx(evaluation.trunk_loss / np.log(2) / num_bytes)
    assert 1.0 <= evaluation.chained_acceptance_length <= 4.0


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = tiny_trainer(tiny_run(tmp_path / "whole"))
    whole.train()
    first = tiny_trainer(tiny_run(tmp_path / "parts"))
    for _ in range(NUM_STEPS // 2):
        first.step()
    first.save()
    # Other initial weights: everything that matters comes from the checkpoint.
    second = tiny_trainer(tiny_run(tmp_path / "parts"), seed=9)
    assert second.progress.step == NUM_STEPS // 2
    second.train()
    assert second.progress.step == whole.progress.step == NUM_STEPS
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name


def test_a_tied_embedding_is_kept_once(tmp_path: Path) -> None:
    def trainer(seed: int) -> Trainer:
        shape = dataclasses.replace(tiny_config(VOCAB_SIZE), tie_word_embeddings=True)
        return Trainer(
            untrained(shape, seed),
            tiny_run(tmp_path),
            train_tokens=tiny_tokens(1),
            held_out_tokens=tiny_tokens(2),
        )

    first = trainer(0)
    first.step()
    first.save()
    second = trainer(9)
    assert second.progress.step == 1
    assert second.model.lm_head.weight is second.model.model.embed_tokens.weight
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name


def test_an_evaluation_after_a_resume_tells_the_rate_of_its_place(tmp_path: Path) -> None:
    first = tiny_trainer(tiny_run(tmp_path))
    for _ in range(NUM_STEPS - 1):
        first.step()
    first.save()
    second = tiny_trainer(tiny_run(tmp_path))
    second.evaluate()
    (record,) = read_log(tmp_path / "log.jsonl")
    # The last step of a decay over 30 % of six: five ninths of the way are left.
    left = (1 - 5 / 6) / 0.3
    assert record["learning_rate"] == pytest.approx(2e-3 * (0.02 + 0.98 * left), rel=1e-4)


@pytest.mark.parametrize("stop_at", [3, 4])
def test_each_evaluation_is_logged_once(tmp_path: Path, stop_at: int) -> None:
    config = tiny_run(tmp_path)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, eval_every_steps=2))

    class StopAt:
        def on_step(self, progress: Progress, fraction: float, num_tokens_per_s: float) -> None:
            if progress.step == stop_at:
                trainer.request_stop()

        def on_record(self, record: object) -> None:
            pass

    tokens = {"train_tokens": tiny_tokens(1), "held_out_tokens": tiny_tokens(2)}
    trainer = Trainer(tiny_model(), config, **tokens, listeners=[StopAt()])
    assert not trainer.train()
    # It goes on to the end, and once more from there.
    for _ in range(2):
        assert tiny_trainer(config).train()
    records = [record for record in read_log(tmp_path / "log.jsonl") if record["kind"] == "eval"]
    assert [record["step"] for record in records] == [2, 4, 6]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data": DataConfig(sequence_length=24, batch_size=1)}, "batch_size was 2, is 1"),
        ({"data": DataConfig(sequence_length=20, batch_size=2)}, "window_size was 26, is 22"),
        ({"text": tiny_tokens(3)}, "text was "),
    ],
)
def test_a_resume_with_other_windows_is_refused(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    text = changes.pop("text", tiny_tokens(1))
    trainer = tiny_trainer(tiny_run(tmp_path))
    trainer.step()
    trainer.save()
    with pytest.raises(OutriderError, match=rf"step-00000001: .*other windows so far \({name}"):
        Trainer(
            tiny_model(),
            tiny_run(tmp_path, **changes),
            train_tokens=text,
            held_out_tokens=tiny_tokens(2),
        )


def test_windows_too_short_for_an_indexer_train_without_its_loss(tmp_path: Path) -> None:
    ratio = tiny_model().config.indexer_compress_ratio
    for length, is_trained in ((2 * ratio - 1, False), (2 * ratio, True)):
        data = DataConfig(sequence_length=length, batch_size=2)
        losses, _ = tiny_trainer(tiny_run(tmp_path / str(length), data=data)).step()
        assert (losses.index.item() > 0) == is_trained
        assert math.isfinite(losses.total.item())


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system refuses to write more to one file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, file: str) -> None:
    trainer = tiny_trainer(tiny_run(tmp_path))
    trainer.step()
    trainer.save()
    trainer.step()
    checkpoints = tmp_path / "checkpoints"
    size = (checkpoints / "step-00000001" / file).stat().st_size
    with (
        files_of_at_most(size - 1),
        pytest.raises(
            OutriderError, match=r"step-00000002: .* written .*File too large.*untouched"
        ),
    ):
        trainer.save()
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000001"]
    assert tiny_trainer(tiny_run(tmp_path)).progress.step == 1
    # With room again the same run goes on.
    trainer.save()
    assert tiny_trainer(tiny_run(tmp_path)).progress.step == 2


def test_exports_on_the_way_are_what_the_weights_were(tmp_path: Path) -> None:
    def trainer(folder: str) -> Trainer:
        # 48 tokens a step: 100, 200 and 300 are passed in steps 3, 5 and 7, of which there are 6.
        config = tiny_run(tmp_path / folder)
        return tiny_trainer(
            dataclasses.replace(
                config, run=dataclasses.replace(config.run, export_every_tokens=100)
            )
        )

    whole = trainer("whole")
    whole.train()
    exports = sorted((tmp_path / "whole" / "exports").iterdir())
    assert [path.name for path in exports] == ["step-00000003", "step-00000005"]
    early, late = (load_model(path).lm_head.weight for path in exports)
    assert not torch.equal(early, late)
    assert not torch.equal(late, whole.model.lm_head.weight.bfloat16().float())
    # A run that is stopped and goes on keeps to the same places.
    half = trainer("half")
    half.step()
    half.step()
    half.request_stop()
    assert not half.train()
    trainer("half").train()
    exports = sorted((tmp_path / "half" / "exports").iterdir())
    assert [path.name for path in exports] == ["step-00000003", "step-00000005"]
    assert torch.equal(load_model(exports[1]).lm_head.weight, late)


class Crash(BaseException):
    """Nothing handles it, as nothing handles a kill."""


@pytest.mark.parametrize(("is_deleting", "newest"), [(False, 1), (True, 2)])
def test_a_crash_leaves_whole_checkpoints_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deleting: bool, newest: int
) -> None:
    config = tiny_run(tmp_path)
    config = dataclasses.replace(
        config, run=dataclasses.replace(config.run, num_kept_checkpoints=1)
    )
    trainer = tiny_trainer(config)
    trainer.step()
    trainer.save()
    trainer.step()
    remove = shutil.rmtree

    def crash(path: Path | torch.nn.Module, *_: object, **options: bool) -> None:
        if isinstance(path, Path) and path.name != ".step-00000001.tmp":
            remove(path, **options)
            return
        if isinstance(path, Path):
            (path / "model.safetensors").unlink()
        raise Crash

    checkpoints = tmp_path / "checkpoints"
    with monkeypatch.context() as patch:
        if is_deleting:
            patch.setattr(checkpoint_module.shutil, "rmtree", crash)
        else:
            patch.setattr(checkpoint_module, "_optimizer_tensors", crash)
        with pytest.raises(Crash):
            trainer.save()
    # What was half written or half deleted is not taken for a checkpoint, and goes.
    assert len(list(checkpoints.iterdir())) == 2
    assert tiny_trainer(config).progress.step == newest
    trainer.save()
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]


def test_the_trunk_can_be_kept_from_the_heads_gradient() -> None:
    window = torch.randint(1, VOCAB_SIZE, (1, 18))
    for kind in ("ce", "kl"):
        without, hidden, shown = (
            trunk_gradients(
                window, LossConfig(kind=kind, mtp_weight=mtp_weight, detach_trunk=detach)
            )
            for mtp_weight, detach in ((0.0, False), (1.0, True), (1.0, False))
        )
        assert "lm_head.weight" in without
        # The routers' balance and the indexers' losses are the same in all three.
        torch.testing.assert_close(hidden, without)
        for name in (
            "lm_head.weight",
            "model.embed_tokens.weight",
            "model.layers.0.mlp.gate.weight",
        ):
            assert not torch.allclose(shown[name], without[name]), name


def trunk_gradients(window: torch.Tensor, loss: LossConfig) -> dict[str, torch.Tensor]:
    model = tiny_model()
    predictions = predict(
        model, window, loss.num_depths, detach_trunk=loss.detach_trunk, want_index_losses=True
    )
    joint_loss(predictions, window, loss, model.config.num_experts_per_tok).total.backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not name.startswith("mtp.")
    }


def test_the_kind_of_the_loss_is_the_heads() -> None:
    window = torch.randint(1, VOCAB_SIZE, (2, 18))
    model = tiny_model()
    predictions = predict(model, window, 3)
    trunk, heads = predictions.trunk, predictions.depths
    expected = {
        "ce": [mtp_loss.draft_loss(head, window, depth) for depth, head in enumerate(heads)],
        "kl": [mtp_loss.draft_kl(trunk, head, depth) for depth, head in enumerate(heads)],
        "lk": [mtp_loss.draft_lk(trunk, head, depth, 0.2) for depth, head in enumerate(heads)],
    }
    for kind, depths in expected.items():
        config = LossConfig(kind=kind, lk_lambda=0.2, router_balance_weight=0.0)
        losses = joint_loss(predictions, window, config, model.config.num_experts_per_tok)
        assert losses.to_dict()["depths"] == [loss.item() for loss in depths], kind
        head = mtp_loss.weighted_depth_loss(depths, config.depth_weights)
        assert losses.total.item() == pytest.approx((losses.trunk + 0.3 * head).item()), kind


def test_only_the_index_loss_trains_the_indexer() -> None:
    window = torch.randint(1, VOCAB_SIZE, (1, 34))
    model = tiny_model()
    for weight in (0.0, 1.0):
        model.zero_grad()
        loss = LossConfig(index_weight=weight)
        predictions = predict(model, window, 3, want_index_losses=weight > 0)
        joint_loss(predictions, window, loss, model.config.num_experts_per_tok).total.backward()
        grads = [p.grad for n, p in model.named_parameters() if "index_qk_proj" in n]
        assert len(grads) == 2  # one sparse layer in the trunk, one in the head
        moved = [grad is not None and bool(grad.abs().max() > 0) for grad in grads]
        assert moved == [weight > 0] * 2


def test_decay_spares_vectors_convolutions_and_embeddings() -> None:
    model = tiny_model()
    decayed, undecayed = make_optimizer(model, tiny_run(Path()).optimizer).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert undecayed["weight_decay"] == 0.0
    kept = {names[id(parameter)] for parameter in undecayed["params"]}
    assert "model.embed_tokens.weight" in kept
    assert "model.layers.1.ple.ple_embedding.ngram_embedding.weight" in kept
    assert "model.layers.0.linear_attn.conv1d.weight" in kept
    assert "model.layers.0.linear_attn.A_log" in kept
    assert "model.layers.0.mlp.experts.down_proj" not in kept
    assert "lm_head.weight" not in kept
    assert len(decayed["params"]) + len(kept) == len(names)
