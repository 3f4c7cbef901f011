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


# The example of the module: laws over two ids, by row.
TRUNK_LAWS = [[0.1, 0.9], [0.75, 0.25], [0.5, 0.5]]
HEAD_LAWS = [[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]
KL_BY_ROW = (
    0.75 * math.log(1.5) + 0.25 * math.log(0.5),
    0.5 * math.log(2.0) + 0.5 * math.log(2 / 3),
)
TV_BY_ROW = (0.25, 0.25)


def law_logits(laws: list[list[float]], shift: float = 3.0) -> torch.Tensor:
    """Logits [1, T, V] of the laws, in float64; a common shift changes no law."""
    return (torch.tensor([laws], dtype=torch.float64).log() + shift).requires_grad_()


def test_kl_and_lk_of_the_example_by_hand() -> None:
    trunk, head = law_logits(TRUNK_LAWS), law_logits(HEAD_LAWS, shift=-1.0)
    kl, tv = sum(KL_BY_ROW) / 2, sum(TV_BY_ROW) / 2
    assert (kl, tv) == (pytest.approx(0.1373, abs=1e-4), 0.25)
    assert mtp_loss.draft_kl(trunk, head, 0).item() == pytest.approx(kl)
    assert mtp_loss.draft_acceptance(trunk, head, 0).item() == pytest.approx(1 - tv)
    for weight in (0.0, 0.3, 1.0):
        expected = weight * kl + (1 - weight) * tv
        assert mtp_loss.draft_lk(trunk, head, 0, weight).item() == pytest.approx(expected)
    # At depth 1 the head's row 0 is out, at depth 2 no row of three is left.
    assert mtp_loss.draft_kl(trunk, head, 1).item() == pytest.approx(KL_BY_ROW[1])
    assert mtp_loss.draft_kl(trunk, head, 2).item() == 0.0


def test_kl_teaches_the_head_alone_on_the_rows_that_count() -> None:
    trunk, head = law_logits(TRUNK_LAWS), law_logits(HEAD_LAWS)
    mtp_loss.draft_kl(trunk, head, 0).backward()
    assert trunk.grad is None
    assert head.grad is not None
    # The gradient of KL(trunk || head) by the head's logits is the difference of the laws; the
    # trunk's row 0 and the head's last row are in no comparison.
    expected = [[(0.5 - 0.75) / 2, (0.5 - 0.25) / 2], [(0.25 - 0.5) / 2, (0.75 - 0.5) / 2], [0, 0]]
    torch.testing.assert_close(head.grad, torch.tensor([expected], dtype=torch.float64))


def test_total_variation_pulls_at_the_ids_with_too_much_mass() -> None:
    trunk, head = law_logits(TRUNK_LAWS), law_logits(HEAD_LAWS)
    mtp_loss.draft_lk(trunk, head, 0, 0.0).backward()
    assert head.grad is not None
    # Row 0: TV = 1/2 (3/4 - h + h' - 1/4) with h + h' = 1, so dTV/dh = -1, times h (1 - h), over
    # two rows.
    torch.testing.assert_close(
        head.grad[0, 0], torch.tensor([-0.25 / 2, 0.25 / 2], dtype=torch.float64)
    )


def test_acceptance_is_the_mass_that_both_laws_share() -> None:
    trunk, head = torch.randn(2, 6, 9), torch.randn(2, 6, 9)
    shared = torch.minimum(trunk.softmax(-1)[:, 1:], head.softmax(-1)[:, :-1]).sum(-1)
    assert mtp_loss.draft_acceptance(trunk, head, 0).item() == pytest.approx(shared.mean().item())
    assert mtp_loss.draft_acceptance(trunk, head, 2).item() == pytest.approx(
        shared[:, 2:].mean().item()
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_a_mask_leaves_out_rows(depth: int) -> None:
    trunk, head = torch.randn(1, 5, 6), torch.randn(1, 5, 6)
    window = torch.tensor([[A, B, C, D, E, A, B]])
    mask = torch.tensor([[True, False, True, True, False]])
    losses = (
        lambda mask: mtp_loss.draft_loss(head, window, depth, mask),
        lambda mask: mtp_loss.draft_kl(trunk, head, depth, mask),
        lambda mask: mtp_loss.draft_lk(trunk, head, depth, 0.5, mask),
        lambda mask: mtp_loss.draft_acceptance(trunk, head, depth, mask),
    )
    for loss in losses:
        alone = [loss(torch.eye(5, dtype=torch.bool)[row][None]) for row in range(depth, 4)]
        kept = [alone[row - depth] for row in range(depth, 4) if mask[0, row]]
        assert loss(mask).item() == pytest.approx(torch.stack(kept).mean().item())
        assert loss(torch.zeros_like(mask)).item() == 0.0
