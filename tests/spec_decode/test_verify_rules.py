"""The acceptance rules against their naive twins, and case by case."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID
from outrider.sampling import sample_with_gumbel
from outrider.spec_decode import (
    VerifyResult,
    block_verify,
    coupled_verify,
    greedy_verify,
    standard_verify,
)
from outrider.spec_decode.verify_rules_naive import (
    block_verify_naive,
    coupled_verify_naive,
    standard_verify_naive,
)

NAIVE = {standard_verify: standard_verify_naive, block_verify: block_verify_naive}
RULES = list(NAIVE)
VOCAB = 7
NOT_FINITE = [torch.nan, -torch.inf, torch.inf]


def random_laws(*shape: int, generator: torch.Generator) -> Tensor:
    """Laws over VOCAB ids, a third of the entries 0."""
    logits = torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64) * 1.5
    is_hidden = torch.rand(*shape, VOCAB, generator=generator) < 0.35
    is_hidden.scatter_(-1, logits.argmax(-1, keepdim=True), value=False)
    return logits.masked_fill(is_hidden, -torch.inf).softmax(-1)


def random_windows(
    batch_size: int, num_drafts: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of a rule: related laws, drafts drawn from theirs, some of them cut short."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, num_drafts)
    target_probs = random_laws(batch_size, num_drafts + 1, generator=generator)
    other = random_laws(*shape, generator=generator)
    share = torch.rand(*shape, 1, generator=generator, dtype=torch.float64).round(decimals=1)
    draft_probs = share * target_probs[:, :num_drafts] + (1 - share) * other
    drafts = torch.zeros(shape, dtype=torch.int64)
    if num_drafts:
        flat = draft_probs.view(-1, VOCAB).multinomial(1, generator=generator)
        drafts = flat.view(shape)
    num_drawn = torch.randint(0, num_drafts + 3, (batch_size, 1), generator=generator)
    drafts = drafts.where(torch.arange(num_drafts) < num_drawn, PLACEHOLDER_TOKEN_ID)
    accept = torch.rand(shape, generator=generator, dtype=torch.float64)
    resample = torch.rand(batch_size, num_drafts + 1, generator=generator, dtype=torch.float64)
    return drafts, draft_probs, target_probs, accept, resample


def emitted(result: VerifyResult, row: int) -> tuple[int, list[int]]:
    tokens = result.output_token_ids[row].tolist()
    num_emitted = len([t for t in tokens if t != PLACEHOLDER_TOKEN_ID])
    assert all(t == PLACEHOLDER_TOKEN_ID for t in tokens[num_emitted:])
    assert result.is_broken[row] == (num_emitted == 0)
    return int(result.num_accepted_tokens[row]), tokens[:num_emitted]


def assert_equal_results(result: VerifyResult, other: VerifyResult) -> None:
    for field in fields(VerifyResult):
        assert torch.equal(getattr(result, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("verify", RULES)
@pytest.mark.parametrize("is_one_hot", [False, True])
def test_rule_equals_its_naive_twin(
    verify: Callable[..., VerifyResult], num_drafts: int, is_one_hot: bool
) -> None:
    drafts, draft_probs, target_probs, accept, resample = random_windows(
        150, num_drafts, num_drafts
    )
    is_hit = torch.rand(target_probs.shape[:2], generator=torch.Generator().manual_seed(1)) < 0.06
    target_probs[is_hit] = torch.nan
    if num_drafts:
        draft_probs[is_hit[:, 1:]] = 0.0
    laws = None if is_one_hot else draft_probs
    result = verify(drafts, laws, target_probs, accept, resample)
    for row in range(len(drafts)):
        expected = NAIVE[verify](
            drafts[row].tolist(),
            None if is_one_hot else draft_probs[row].tolist(),
            target_probs[row].tolist(),
            accept[row].tolist(),
            resample[row].tolist(),
        )
        assert emitted(result, row) == expected


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8])
def test_coupled_equals_its_naive_twin(num_drafts: int) -> None:
    drafts, _, target_probs, _, _ = random_windows(150, num_drafts, num_drafts)
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(target_probs.shape, generator=generator, dtype=torch.float64)
    gumbel = -(-uniforms.log()).log()
    drawn = sample_with_gumbel(target_probs, gumbel)[:, :num_drafts]
    is_same = torch.rand(drafts.shape, generator=generator) < 0.7
    drafts = drawn.where(is_same & (drafts >= 0), drafts)
    target_probs[torch.rand(target_probs.shape[:2], generator=generator) < 0.06] = torch.nan
    result = coupled_verify(drafts, target_probs, gumbel)
    assert result.num_accepted_tokens.max() == num_drafts
    for row in range(len(drafts)):
        expected = coupled_verify_naive(
            drafts[row].tolist(), target_probs[row].tolist(), gumbel[row].tolist()
        )
        assert emitted(result, row) == expected


@pytest.mark.parametrize(
    ("drafts", "argmax", "num_accepted", "output"),
    [
        ([9, 9, 9], [1, 2, 3, 4], 0, [1]),
        ([1, 9, 3], [1, 2, 3, 4], 1, [1, 2]),
        ([1, 2, 9], [1, 2, 3, 4], 2, [1, 2, 3]),
        ([1, 2, 3], [1, 2, 3, 4], 3, [1, 2, 3, 4]),
        ([1, -1, -1], [1, 2, 3, 4], 1, [1, 2]),
        ([-1, -1, -1], [1, 2, 3, 4], 0, [1]),
        ([1, 2, 3], [-1, 2, 3, 4], 0, []),
        ([1, 2, 3], [1, 2, -1, 4], 1, [1, 2]),
        ([1, 9, 3], [1, 2, -1, 4], 1, [1, 2]),
        ([-1, -1, -1], [1, -1, -1, -1], 0, [1]),
        ([1, -1, -1], [1, -1, -1, -1], 0, [1]),
    ],
)
def test_greedy_table(
    drafts: list[int], argmax: list[int], num_accepted: int, output: list[int]
) -> None:
    result = greedy_verify(torch.tensor([drafts]), torch.tensor([argmax]))
    assert emitted(result, 0) == (num_accepted, output)


@pytest.mark.parametrize("verify", RULES)
@pytest.mark.parametrize("is_one_hot", [False, True])
def test_temperature_zero_rows_of_a_mixed_batch_are_argmax_equality(
    verify: Callable[..., VerifyResult], is_one_hot: bool
) -> None:
    drafts, draft_probs, target_probs, accept, resample = random_windows(400, 4, 0)
    argmax = target_probs.argmax(-1)
    is_greedy = torch.arange(400) % 2 == 0
    drafts[::4] = argmax[::4, :4].where(torch.rand(100, 4) < 0.8, drafts[::4])
    is_drawn = drafts >= 0
    at_draft = drafts.clamp(min=0).unsqueeze(-1)
    draft_probs.scatter_(-1, at_draft, draft_probs.gather(-1, at_draft).clamp(min=1e-9))
    one_hot = torch.nn.functional.one_hot(argmax, VOCAB).double()
    target_probs[is_greedy] = one_hot[is_greedy]
    laws = None if is_one_hot else draft_probs
    result = verify(drafts, laws, target_probs, accept, resample)
    expected = greedy_verify(drafts, argmax)
    for name in ("num_accepted_tokens", "output_token_ids"):
        assert torch.equal(getattr(result, name)[is_greedy], getattr(expected, name)[is_greedy])
    assert result.num_fallbacks.sum() == 0
    assert is_drawn.any()
    gumbel = torch.randn(400, 5, VOCAB).double() * 5
    coupled = coupled_verify(drafts, one_hot, gumbel)
    assert torch.equal(coupled.output_token_ids, expected.output_token_ids)


def test_two_token_draft_argmax_that_is_not_the_targets_is_rejected_at_temperature_zero() -> None:
    """However likely the draft is under the target: temperature 0 compares ids, not ratios."""
    target_logits = torch.tensor([[[0.49, 0.51], [0.0, 1.0]]]).log()
    result = greedy_verify(torch.tensor([[0]]), target_logits.argmax(-1))
    assert emitted(result, 0) == (0, [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("verify", RULES)
def test_draft_equal_to_target_is_always_kept(
    verify: Callable[..., VerifyResult], dtype: torch.dtype
) -> None:
    logits = torch.randn(500, 5, 50) * 3
    target_probs = logits.to(dtype).softmax(-1)
    draft_probs = target_probs[:, :4].contiguous()
    drafts = draft_probs.view(-1, 50).multinomial(1).view(500, 4)
    highest = torch.full((500, 5), 1 - 2.0**-53, dtype=torch.float64)
    result = verify(drafts, draft_probs, target_probs, highest[:, :4], highest)
    assert (result.num_accepted_tokens == 4).all()


def test_rules_agree_coin_for_coin_at_one_draft() -> None:
    """C02: at K = 1 the block rule is the standard rule."""
    arguments = random_windows(2000, 1, 3)
    assert_equal_results(standard_verify(*arguments), block_verify(*arguments))


def test_block_of_certain_drafts_is_the_standard_rule() -> None:
    drafts, _, target_probs, accept, resample = random_windows(500, 4, 3)
    standard = standard_verify(drafts, None, target_probs, accept, resample)
    assert_equal_results(block_verify(drafts, None, target_probs, accept, resample), standard)


@pytest.mark.parametrize("is_one_hot", [False, True])
@pytest.mark.parametrize("verify", RULES)
def test_placeholders_are_never_kept_and_what_lies_past_them_is_never_read(
    verify: Callable[..., VerifyResult], is_one_hot: bool
) -> None:
    """C04, with everything past the first placeholder poisoned."""
    drafts = torch.tensor([[5, -1, -1], [-1, -1, -1], [5, 6, -1], [5, 6, 0]])
    num_drawn = torch.tensor([1, 0, 2, 3])
    _, draft_probs, target_probs, accept, resample = random_windows(4, 3, 5)
    draft_probs = torch.full_like(draft_probs, 1 / VOCAB)
    target_probs = torch.full_like(target_probs, 1 / VOCAB)
    is_past = torch.arange(3) >= num_drawn.unsqueeze(-1)
    draft_probs[is_past] = torch.nan
    target_probs[:, 1:][is_past] = torch.nan
    # Every draft has ratio 1 or, one-hot, is met by a uniform that accepts it.
    accept = accept * (1 / VOCAB)
    laws = None if is_one_hot else draft_probs
    result = verify(drafts, laws, target_probs, accept, resample)
    assert torch.equal(result.num_accepted_tokens, num_drawn)
    assert not result.is_broken.any()
    assert not result.num_fallbacks.any()
    for row in range(4):
        _, tokens = emitted(result, row)
        assert len(tokens) == num_drawn[row] + 1
        assert all(0 <= token < VOCAB for token in tokens)
        # The token at the first placeholder is drawn from the target itself.
        assert tokens[-1] == int(resample[row, num_drawn[row]] * VOCAB)


@pytest.mark.parametrize("verify", RULES)
def test_ids_outside_the_vocabulary_were_not_drawn(verify: Callable[..., VerifyResult]) -> None:
    _, draft_probs, target_probs, accept, resample = random_windows(1, 3, 5)
    drafts = torch.tensor([[VOCAB, 0, 10**12]])
    result = verify(drafts, draft_probs, target_probs, accept, resample)
    assert emitted(result, 0)[0] == 0
    assert 0 <= result.output_token_ids[0, 0] < VOCAB


@pytest.mark.parametrize("verify", RULES)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_broken_target_row_touches_its_own_request_alone(
    verify: Callable[..., VerifyResult], value: float
) -> None:
    """C03 (a), the first target row of the middle request."""
    drafts, draft_probs, target_probs, accept, resample = random_windows(3, 3, 8)
    alone = [
        verify(*(x[row : row + 1] for x in (drafts, draft_probs, target_probs, accept, resample)))
        for row in range(3)
    ]
    target_probs[1] = value
    result = verify(drafts, draft_probs, target_probs, accept, resample)
    assert result.is_broken.tolist() == [False, True, False]
    assert emitted(result, 1) == (0, [])
    for row in (0, 2):
        assert emitted(result, row) == emitted(alone[row], 0)
    assert result.output_token_ids.max() < VOCAB
    gumbel = torch.zeros_like(target_probs)
    assert coupled_verify(drafts, target_probs, gumbel).is_broken.tolist() == [False, True, False]


@pytest.mark.parametrize("verify", RULES)
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("broken", [1, 2, 3])
def test_broken_later_target_row_cuts_the_window_before_it(
    verify: Callable[..., VerifyResult], value: float, broken: int
) -> None:
    """All drafts would be kept; the one before the broken row stands as the last token."""
    target_probs = torch.full((1, 4, VOCAB), 1 / VOCAB, dtype=torch.float64)
    draft_probs = target_probs[:, :3].clone()
    drafts = torch.tensor([[3, 4, 5]])
    target_probs[:, broken, 2] = value
    half = torch.full((1, 4), 0.5, dtype=torch.float64)
    result = verify(drafts, draft_probs, target_probs, half[:, :3], half)
    assert emitted(result, 0) == (broken - 1, [3, 4, 5][:broken])
    assert result.num_fallbacks.tolist() == [1]


@pytest.mark.parametrize("verify", RULES)
@pytest.mark.parametrize("value", [torch.nan, 0.0])
def test_broken_draft_row_falls_back_to_the_target(
    verify: Callable[..., VerifyResult], value: float
) -> None:
    """C03 (b): 50,000 trials never emit the draft, and what they emit follows the target."""
    num_trials = 50_000
    target_row = torch.tensor([1e-20, 0.25, 0.25, 0.5], dtype=torch.float64)
    drafts = torch.zeros(num_trials, 1, dtype=torch.int64)
    draft_probs = torch.full((num_trials, 1, 4), value, dtype=torch.float64)
    target_probs = target_row.expand(num_trials, 2, 4)
    uniforms = torch.rand(num_trials, 3, dtype=torch.float64).clamp_(min=2.0**-53)
    result = verify(drafts, draft_probs, target_probs, uniforms[:, :1], uniforms[:, 1:])
    assert (result.num_accepted_tokens == 0).all()
    assert (result.num_fallbacks == 1).all()
    counts = result.output_token_ids[:, 0].bincount(minlength=4)
    assert counts[0] == 0
    sigma = (num_trials * target_row * (1 - target_row)).sqrt()
    assert ((counts - num_trials * target_row).abs()[1:] < 4 * sigma[1:]).all()


def test_residual_without_mass_falls_back_to_the_target() -> None:
    """Laws that differ by a rounding error: the target row is below the draft row everywhere."""
    draft_row = torch.tensor([0.25, 0.75], dtype=torch.float64)
    target_row = draft_row * (1 - 1e-9)
    near_one = torch.full((1, 1), 1 - 1e-12, dtype=torch.float64)
    result = standard_verify(
        torch.tensor([[0]]),
        draft_row.view(1, 1, 2),
        target_row.expand(1, 2, 2),
        near_one,
        torch.full((1, 2), 0.5, dtype=torch.float64),
    )
    assert emitted(result, 0) == (0, [1])
    assert result.num_fallbacks.tolist() == [1]


@pytest.mark.parametrize("verify", RULES)
def test_ratios_beyond_the_dtype_do_not_revive_a_dead_prefix(
    verify: Callable[..., VerifyResult],
) -> None:
    """The first draft is impossible, the second has a draft probability near the smallest float."""
    target_probs = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]])
    draft_probs = torch.tensor([[[0.5, 0.5], [1e-45, 1.0]]])
    half = torch.full((1, 3), 0.5, dtype=torch.float64)
    result = verify(torch.tensor([[0, 0]]), draft_probs, target_probs, half[:, :2], half)
    assert emitted(result, 0) == (0, [1])


def test_inputs_may_be_strided_and_are_not_changed() -> None:
    arguments = random_windows(64, 3, 11)
    strided = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in arguments]
    copies = [x.clone() for x in strided]
    for verify in RULES:
        assert_equal_results(verify(*strided), verify(*arguments))
    gumbel = torch.randn(64, 4, VOCAB)
    coupled_verify(strided[0], strided[2], gumbel)
    assert all(torch.equal(x, y) for x, y in zip(strided, copies, strict=True))


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_rules_never_wait_for_the_device_nor_leave_it(num_drafts: int) -> None:
    """On meta tensors an `.item()`, a shape that hangs on values, or another device raises."""
    with torch.device("meta"):
        drafts = torch.zeros(4, num_drafts, dtype=torch.int64)
        draft_probs = torch.rand(4, num_drafts, VOCAB)
        target_probs = torch.rand(4, num_drafts + 1, VOCAB)
        accept = torch.rand(4, num_drafts, dtype=torch.float64)
        resample = torch.rand(4, num_drafts + 1, dtype=torch.float64)
        gumbel = torch.rand(4, num_drafts + 1, VOCAB, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        drafts + torch.ones(4, 1)
    results = [coupled_verify(drafts, target_probs, gumbel)]
    for verify in RULES:
        for laws in (draft_probs, None):
            results.append(verify(drafts, laws, target_probs, accept, resample))
    for result in results:
        for field in fields(VerifyResult):
            assert getattr(result, field.name).device.type == "meta"
        assert result.output_token_ids.shape == (4, num_drafts + 1)
