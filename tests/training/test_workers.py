"""Threads that share a step's windows: the gradient is that of the batch, to the bit each time."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.ops import native
from outrider.training.config import LossConfig, TrainConfig
from outrider.training.objective import Losses, joint_loss, predict
from outrider.training.workers import Workers
from tests.ops.sequence_form import HAS_COMPILER
from tests.training.test_trainer import VOCAB_SIZE, tiny_model, tiny_run, tiny_trainer

# The balance of a batch is not the mean of the balances of its parts; the other losses are.
LOSSES = LossConfig(router_balance_weight=0.0)


def losses_of(model: Qwen4ExpForCausalLM) -> Callable[[Tensor], Losses]:
    def losses(window: Tensor) -> Losses:
        predictions = predict(model, window, 3, dense_attention=True, want_index_losses=True)
        return joint_loss(predictions, window, LOSSES, model.config.num_experts_per_tok)

    return losses


def gradients(num_workers: int, window: Tensor) -> tuple[Losses, dict[str, Tensor | None]]:
    model = tiny_model()
    losses = Workers(num_workers).backward(list(model.parameters()), losses_of(model), window)
    return losses, {name: p.grad for name, p in model.named_parameters()}


def test_shares_add_up_to_the_batch() -> None:
    window = torch.randint(1, VOCAB_SIZE, (6, 26))
    expected_losses, expected = gradients(1, window)
    for num_workers in (2, 3):
        losses, actual = gradients(num_workers, window)
        for name in ("loss", "trunk", "depths", "index"):
            assert losses.to_dict()[name] == pytest.approx(expected_losses.to_dict()[name])
        for name, gradient in expected.items():
            part = actual[name]
            assert (part is None) == (gradient is None), name
            if part is not None and gradient is not None:
                torch.testing.assert_close(part, gradient, rtol=1e-4, atol=1e-6)


def test_the_same_bits_each_time() -> None:
    window = torch.randint(1, VOCAB_SIZE, (4, 26))
    _, first = gradients(4, window)
    for _ in range(5):
        _, again = gradients(4, window)
        for name, gradient in first.items():
            other = again[name]
            if gradient is None or other is None:
                assert gradient is other is None
            else:
                assert torch.equal(gradient, other), name


def test_gradients_of_the_step_before_are_gone() -> None:
    model = tiny_model()
    window = torch.randint(1, VOCAB_SIZE, (2, 26))
    parameters = list(model.parameters())
    for num_workers in (1, 2):
        workers = Workers(num_workers)
        results = []
        for _ in range(2):
            workers.backward(parameters, losses_of(model), window)
            results.append(model.lm_head.weight.grad)
        first, second = results
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)


def test_an_error_in_a_worker_ends_the_step() -> None:
    def fails(window: Tensor) -> Losses:
        raise ValueError(f"no losses of {len(window)} windows")

    with pytest.raises(ValueError, match="no losses of 1 windows"):
        Workers(2).backward([], fails, torch.zeros(2, 4))


def worker_run(output_dir: Path, num_workers: int, **changes: object) -> TrainConfig:
    config = tiny_run(output_dir)
    run = dataclasses.replace(config.run, num_workers=num_workers, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(config, run=run)


def test_a_resumed_run_with_workers_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = tiny_trainer(worker_run(tmp_path / "whole", 2))
    whole.train()
    first = tiny_trainer(worker_run(tmp_path / "parts", 2))
    first.step()
    first.save()
    second = tiny_trainer(worker_run(tmp_path / "parts", 2), seed=9)
    second.train()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_native_kernels_train_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_enabled", [])
    plain = tiny_trainer(worker_run(tmp_path / "plain", 1))
    plain_losses, plain_norm = plain.step()
    compiled = tiny_trainer(worker_run(tmp_path / "compiled", 2, compile=True))
    losses, norm = compiled.step()
    assert native.kernels(torch.zeros(1)) is not None
    assert losses.total.item() == pytest.approx(plain_losses.total.item(), rel=1e-4)
    assert norm == pytest.approx(plain_norm, rel=1e-3)


def test_windows_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.num_workers: 3 cannot share 2 windows"):
        worker_run(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"run\.num_workers: 0 is not at least 1"):
        worker_run(tmp_path, 0)
