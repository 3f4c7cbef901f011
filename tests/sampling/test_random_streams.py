"""The random streams: exact bits, the open interval, independence of what the key tells apart."""

import math

import pytest
import torch
from torch import Tensor

from outrider.sampling import Purpose, gumbel_noise, uniforms
from tests.chi_square import chi_square_p_value

PASSES = 1e-6  # one false alarm in a million choices of keys, for each call
MASK = (1 << 64) - 1
NUM_KEYS = 100_000
GOLDEN_UNIFORMS = ["0x1.8769351eb3708p-4", "0x1.e8d4dbc9250c1p-1", "0x1.ea6b811263c03p-1"]
GOLDEN_NOISE = [-0.029853752297066393, 0.6714218063486732, -0.3693880845272001]


def splitmix(word: int) -> int:
    """The finaliser of splitmix64, on Python's unbounded integers."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def naive_uniform(seed: int, choice: int, position: int, depth: int, purpose: int) -> float:
    state = 0
    for word in (seed, choice, position, purpose, depth):
        state = splitmix((state ^ (word & MASK)) + 0x9E3779B97F4A7C15 & MASK)
    return ((state >> 12) + 0.5) / 2**52


def column(*values: int) -> Tensor:
    return torch.tensor(values)


def stream(
    *,
    seed: int | Tensor = 7,
    choice: int | Tensor = 0,
    position: int | Tensor = 0,
    depth: int | Tensor = 0,
    purpose: Purpose = Purpose.DRAFT,
) -> Tensor:
    keys = [torch.as_tensor(word) for word in (seed, choice, position, depth)]
    return uniforms(*keys, purpose)


def test_golden_values() -> None:
    """These bits are a promise: a change of them changes every seeded text."""
    drawn = uniforms(
        column(0, 1, -1), column(0, 0, 3), column(0, 17, 2**40), column(2), Purpose.ACCEPT
    )
    assert [value.hex() for value in drawn.tolist()] == GOLDEN_UNIFORMS
    noise = gumbel_noise(column(42), column(1), column(1000), 3)
    assert noise[0].tolist() == pytest.approx(GOLDEN_NOISE, rel=1e-13)


def test_equals_the_naive_hash_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    extremes = column(0, 1, -1, 2**63 - 1, -(2**63))
    for purpose in Purpose:
        words = torch.randint(-(2**63), 2**63 - 1, (4, 50), generator=generator)
        words = torch.cat([words, extremes.expand(4, 5)], 1)
        drawn = uniforms(words[0], words[1], words[2], words[3], purpose)
        for key, value in zip(words.T.tolist(), drawn.tolist(), strict=True):
            assert value == naive_uniform(*key, purpose=int(purpose))


def test_values_do_not_depend_on_shape_order_or_strides() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (4, 6, 8), generator=generator)
    drawn = uniforms(*words, Purpose.DRAFT)
    strided = words.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not strided[0].is_contiguous()
    assert torch.equal(uniforms(*strided, Purpose.DRAFT), drawn)
    assert torch.equal(uniforms(*words[:, ::2, 3], Purpose.DRAFT), drawn[::2, 3])
    assert torch.equal(uniforms(*words.flip(1), Purpose.DRAFT), drawn.flip(0))
    by_row = uniforms(
        words[0, :, :1], words[1, :, :1], words[2, :, :1], torch.arange(5), Purpose.ACCEPT
    )
    assert by_row.shape == (6, 5)
    assert by_row[4, 3] == naive_uniform(*words[:3, 4, 0].tolist(), depth=3, purpose=2)


def test_one_call_for_several_purposes() -> None:
    seeds, zero, depth = column(3, 4).unsqueeze(-1), column(0), torch.arange(4)
    purposes = column(*Purpose).view(-1, 1, 1)
    together = uniforms(seeds, zero, zero + 9, depth, purposes)
    assert together.shape == (len(Purpose), 2, 4)
    for drawn, purpose in zip(together, Purpose, strict=True):
        assert torch.equal(drawn, uniforms(seeds, zero, zero + 9, depth, purpose))


def test_words_are_not_changed() -> None:
    words = torch.arange(20).view(4, 5)
    uniforms(*words, Purpose.DRAFT)
    gumbel_noise(*words[:3], vocab_size=4)
    assert torch.equal(words, torch.arange(20).view(4, 5))


def test_open_interval_and_exact_cells() -> None:
    """Lowest, highest and middle word of the hash: never 0, never 1, no rounding on the way."""
    from outrider.sampling.random_streams import _to_uniform

    low, high, middle = _to_uniform(column(0, -1, -(2**63))).tolist()
    assert low == 2.0**-53
    assert high == 1 - 2.0**-53
    assert middle == 0.5 + 2.0**-53
    drawn = stream(seed=torch.arange(2_000_000))
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert drawn.dtype == torch.float64


def test_uniform_over_consecutive_words() -> None:
    counter = torch.arange(NUM_KEYS)
    for drawn in (
        stream(seed=counter),
        stream(choice=counter),
        stream(position=counter),
        stream(depth=counter),
        stream(seed=counter << 32),
        stream(seed=-counter, purpose=Purpose.RESAMPLE),
    ):
        counts = (drawn * 256).long().bincount(minlength=256)
        assert chi_square_p_value(counts, torch.full((256,), 1 / 256)) > PASSES
        fine = ((drawn * 2**40) % 1 * 256).long().bincount(minlength=256)
        assert chi_square_p_value(fine, torch.full((256,), 1 / 256)) > PASSES


def assert_independent(first: Tensor, second: Tensor) -> None:
    cells = (first * 16).long() * 16 + (second * 16).long()
    counts = cells.bincount(minlength=256)
    assert chi_square_p_value(counts, torch.full((256,), 1 / 256)) > PASSES


def test_streams_that_differ_in_one_word_are_independent() -> None:
    counter = torch.arange(NUM_KEYS)
    base = stream(position=counter)
    for other in (
        stream(position=counter, seed=8),
        stream(position=counter, choice=1),
        stream(position=counter + 1),
        stream(position=counter, depth=1),
        stream(position=counter, purpose=Purpose.ACCEPT),
        stream(position=counter, purpose=Purpose.RESAMPLE),
        stream(position=counter, purpose=Purpose.COUPLED),
    ):
        assert_independent(base, other)


def test_words_do_not_stand_in_for_each_other() -> None:
    """(position, depth) = (n, 1) and (n + 1, 0), and exchanged words, are other numbers."""
    counter = torch.arange(NUM_KEYS)
    assert_independent(stream(position=counter, depth=1), stream(position=counter + 1, depth=0))
    assert_independent(stream(seed=counter, position=3), stream(seed=3, position=counter))
    assert_independent(stream(seed=counter, choice=3), stream(seed=3, choice=counter))
    assert_independent(stream(choice=counter, position=3), stream(choice=3, position=counter))
    assert_independent(stream(depth=counter, position=3), stream(depth=3, position=counter))
    assert_independent(stream(position=counter), stream(position=counter ^ 1))


def test_chi_square_sees_streams_that_are_not_independent() -> None:
    base = stream(position=torch.arange(NUM_KEYS))
    with pytest.raises(AssertionError):
        assert_independent(base, base)
    with pytest.raises(AssertionError):
        assert_independent(base, (base + stream(seed=9, position=torch.arange(NUM_KEYS)) / 20) % 1)


def test_gumbel_noise_is_the_coupled_stream_by_token_id() -> None:
    seeds, choice, position = column(5, 6), column(0, 1), column(30, 40)
    noise = gumbel_noise(seeds, choice, position, 10)
    assert noise.shape == (2, 10)
    for row in range(2):
        for token_id in range(10):
            key = (int(seeds[row]), int(choice[row]), int(position[row]))
            uniform = naive_uniform(*key, depth=token_id, purpose=4)
            expected = -math.log(-math.log(uniform))
            assert float(noise[row, token_id]) == pytest.approx(expected, rel=1e-13)
    # The same noise whatever else is in the batch, and for any leading shape.
    window = gumbel_noise(seeds[:1, None], choice[:1, None], column(29, 30, 31).unsqueeze(0), 10)
    assert torch.equal(window[0, 1], noise[0])
    assert torch.equal(gumbel_noise(seeds[:1], choice[:1], position[:1], 4)[0], noise[0, :4])


def test_gumbel_noise_is_finite_and_follows_its_law() -> None:
    noise = gumbel_noise(column(3), column(0), column(0), 248_320)[0]
    assert noise.isfinite().all()
    assert noise.min() > -3.7
    assert noise.max() < 36.8
    counts = ((-(-noise).exp()).exp() * 200).long().bincount(minlength=200)
    assert chi_square_p_value(counts, torch.full((200,), 1 / 200)) > PASSES


def test_streams_stay_on_their_device_and_never_wait_for_it() -> None:
    """On meta tensors a tensor of another device, or a read of a value, raises."""
    with torch.device("meta"):
        seeds, depth = torch.zeros(3, 1, dtype=torch.int64), torch.arange(4)
    assert uniforms(seeds, seeds, seeds, depth, Purpose.DRAFT).shape == (3, 4)
    assert gumbel_noise(seeds, seeds, seeds, 5).shape == (3, 1, 5)
