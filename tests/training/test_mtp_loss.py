"""Alignment and value of the losses, on five tokens by hand."""

import math

import pytest
import torch

from outrider.training import mtp_loss

A, B, C, D, E = range(5)
WINDOW = torch.tensor([[A, B, C, D, E]])  # T = 3 rows
OTHER = 5


def certain_of(*ids: int, vocab_size: int = 6) -> torch.Tensor:
    """Logits [1, T, V] that put (nearly) all probability on one id a row."""
    return 50.0 * torch.nn.functional.one_hot(torch.tensor([ids]), vocab_size).float()


def test_rows_of_the_example() -> None:
    assert mtp_loss.input_ids(WINDOW).tolist() == [[A, B, C]]
    assert mtp_loss.next_ids(WINDOW).tolist() == [[B, C, D]]
    assert mtp_loss.draft_targets(WINDOW).tolist() == [[C, D, E]]


def test_trunk_predicts_the_next_id() -> None:
    assert mtp_loss.next_token_loss(certain_of(B, C, D), WINDOW).item() == pytest.approx(0.0)
    # One row of three is wrong by 50 nats.
    assert mtp_loss.next_token_loss(certain_of(B, C, E), WINDOW).item() == pytest.approx(50 / 3)


@pytest.mark.parametrize(
    ("depth", "ids"),
    [(0, (C, D, E)), (1, (OTHER, D, E)), (2, (OTHER, OTHER, E))],
)
def test_head_predicts_the_id_after_the_next_at_every_depth(
    depth: int, ids: tuple[int, int, int]
) -> None:
    # Rows before the depth hold nonsense and take no part.
    assert mtp_loss.draft_loss(certain_of(*ids), WINDOW, depth).item() == pytest.approx(0.0)


def test_masked_rows_get_no_gradient() -> None:
    logits = torch.zeros(1, 3, 6, requires_grad=True)
    mtp_loss.draft_loss(logits, WINDOW, 1).backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].abs().max() == 0
    assert (logits.grad[0, 1:].abs().amax(-1) > 0).all()


def test_cross_entropy_by_hand() -> None:
    # Two ids at odds of 3 to 1, the target once the likelier one and twice the other.
    logits = torch.full((1, 3, 6), -torch.inf)
    logits[..., C] = math.log(3.0)
    logits[..., D] = 0.0
    window = torch.tensor([[A, B, C, D, D]])
    expected = (math.log(4 / 3) + 2 * math.log(4)) / 3
    assert mtp_loss.draft_loss(logits, window, 0).item() == pytest.approx(expected)


def test_depth_weights_are_normalised() -> None:
    losses = [torch.tensor(value) for value in (1.0, 2.0, 4.0)]
    combined = mtp_loss.weighted_depth_loss(losses, (0.51, 0.31, 0.18))
    assert combined.item() == pytest.approx(0.51 + 0.62 + 0.72)
    assert mtp_loss.weighted_depth_loss(losses, (2, 1, 1)).item() == pytest.approx(2.0)
    with pytest.raises(ValueError, match="3 depths but 1 weights"):
        mtp_loss.weighted_depth_loss(losses, (1.0,))


def test_load_balancing_loss_spans_one_to_e_over_k() -> None:
    num_experts, k = 4, 2
    # Rows take turns: experts 0 and 1, then 2 and 3, each pair with nearly all the probability.
    pairs = torch.tensor([[9.0, 9.0, -9.0, -9.0], [-9.0, -9.0, 9.0, 9.0]])
    assert mtp_loss.load_balancing_loss([pairs], k).item() == pytest.approx(1.0, abs=1e-4)
    collapsed = pairs[:1].expand(6, num_experts)
    loss = mtp_loss.load_balancing_loss([collapsed], k)
    assert loss.item() == pytest.approx(num_experts / k, abs=1e-4)
    both = mtp_loss.load_balancing_loss([pairs, collapsed], k)
    assert both.item() == pytest.approx(1.5, abs=1e-4)


def test_agreement_compares_with_the_trunks_next_row() -> None:
    # The trunk would write c, d, x after b, c, d; its row 0 (what follows a) is nobody's target.
    trunk = certain_of(OTHER, C, D)
    heads = [certain_of(C, D, A), certain_of(C, D, A), certain_of(C, D, A)]
    agreements = mtp_loss.draft_agreement(trunk, heads)
    assert [a.tolist() for a in agreements] == [[[True, True]], [[False, True]], [[False, False]]]


def test_chain_ends_at_the_first_disagreement() -> None:
    by_depth = [
        torch.tensor([[True, True, False, True, True]]),
        torch.tensor([[False, True, False, True, True]]),
        torch.tensor([[False, False, True, True, True]]),
    ]
    # Diagonals: (0,1,2) = T T T, (1,2,3) = T F, (2,3,4) = F.
    assert mtp_loss.num_chained(by_depth).tolist() == [[3, 1, 0]]
