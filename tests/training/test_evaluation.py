"""Held-out measurements: means over uneven batches, and the indexers' choice beside all keys."""

import math

import pytest
import torch

from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.training import mtp_loss
from outrider.training.evaluation import evaluate
from outrider.training.objective import predict
from tests.training.tiny_run import tiny_config

VOCAB_SIZE = 64


@pytest.fixture
def model() -> Qwen4ExpForCausalLM:
    model = Qwen4ExpForCausalLM(tiny_config(VOCAB_SIZE), num_mtp_layers=1)
    # Larger than at the start of training, so that attention to other keys gives other logits.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
    model.build_tables()
    return model


def test_sparse_beside_dense(model: Qwen4ExpForCausalLM) -> None:
    # Two blocks of 4 are chosen, so that up to 11 keys nothing is dropped: rows 0 to 10.
    assert model.config.index_dense_limit == 11
    windows = torch.randint(1, VOCAB_SIZE, (3, 16 + 2))
    evaluation = evaluate(model, windows, num_depths=3, bytes_per_token=2.0, batch_size=2)
    targets = windows[:, 1:-1]
    losses = {}
    for is_dense in (False, True):
        with torch.no_grad():
            logits = predict(model, windows, 0, dense_attention=is_dense).trunk
        losses[is_dense] = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        ).view(3, 16)
    assert not torch.allclose(losses[False][:, 11:], losses[True][:, 11:])
    torch.testing.assert_close(losses[False][:, :11], losses[True][:, :11])
    assert evaluation.num_rows_past_budget == 3 * 5
    assert evaluation.trunk_loss == pytest.approx(losses[False].mean().item(), rel=1e-5)
    assert evaluation.loss_past_budget == pytest.approx(
        losses[False][:, 11:].mean().item(), rel=1e-5
    )
    assert evaluation.dense_loss_past_budget == pytest.approx(
        losses[True][:, 11:].mean().item(), rel=1e-5
    )
    bits_per_byte = losses[True].mean().item() / math.log(2) / 2.0
    assert evaluation.dense_bits_per_byte == pytest.approx(bits_per_byte, rel=1e-5)
    # 12 to 16 keys visible: the two blocks chosen, and 0, 1, 2, 3, 0 of the one that is open.
    assert evaluation.attended_share_past_budget == pytest.approx(
        (8 / 12 + 9 / 13 + 10 / 14 + 11 / 15 + 8 / 16) / 5
    )


def test_the_head_is_measured_over_uneven_batches(model: Qwen4ExpForCausalLM) -> None:
    windows = torch.randint(1, VOCAB_SIZE, (3, 10 + 2))
    evaluation = evaluate(model, windows, num_depths=2, bytes_per_token=2.0, batch_size=2)
    with torch.no_grad():
        predictions = predict(model, windows, 2)
    expected = [
        mtp_loss.draft_loss(logits, windows, depth).item()
        for depth, logits in enumerate(predictions.depths)
    ]
    assert evaluation.depth_losses == pytest.approx(expected, rel=1e-5)
    agreements = mtp_loss.draft_agreement(predictions.trunk, predictions.depths)
    assert evaluation.agreement_per_depth == pytest.approx(
        [agreement[:, depth:].float().mean().item() for depth, agreement in enumerate(agreements)]
    )
    laws = predictions.trunk.softmax(-1), [logits.softmax(-1) for logits in predictions.depths]
    shared = [torch.minimum(laws[0][:, 1:], law[:, :-1]).sum(-1) for law in laws[1]]
    assert evaluation.overlap_per_depth == pytest.approx(
        [row[:, depth:].mean().item() for depth, row in enumerate(shared)], rel=1e-5
    )
    accepted = mtp_loss.num_chained(agreements).float().mean().item()
    assert evaluation.chained_acceptance_length == pytest.approx(1 + accepted)
    # Too short to reach the budget.
    assert evaluation.num_rows_past_budget == 0
    assert evaluation.loss_past_budget is None
    assert evaluation.dense_loss_past_budget is None
    assert evaluation.attended_share_past_budget is None
    assert evaluation.dense_bits_per_byte == pytest.approx(evaluation.bits_per_byte, rel=1e-5)


def test_a_trunk_alone_has_no_figures_of_a_head(model: Qwen4ExpForCausalLM) -> None:
    model.mtp = None
    windows = torch.randint(1, VOCAB_SIZE, (2, 10 + 2))
    evaluation = evaluate(model, windows, num_depths=0, bytes_per_token=2.0, batch_size=2)
    assert evaluation.depth_losses == evaluation.agreement_per_depth == []
    assert evaluation.overlap_per_depth == []
    assert evaluation.chained_acceptance_length is None
    with pytest.raises(ValueError, match="no MTP head to train"):
        evaluate(model, windows, num_depths=1, bytes_per_token=2.0, batch_size=2)
