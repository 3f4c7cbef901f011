"""Random numbers as a pure function of a key, so that no draw depends on what ran before it.

The hash absorbs the words of the key one by one, each followed by the finaliser of splitmix64
(the constants of its "variant 13"). Everything is element-wise int64 arithmetic: any device, any
batch, any order gives the same bits. It runs outside the model's graph, so that a captured graph
replays with fresh numbers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch
from torch import Tensor


def _as_int64(word: int) -> int:
    """The signed integer with the same 64 bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


_GAMMA: Final = _as_int64(0x9E3779B97F4A7C15)
_MULTIPLIER_1: Final = _as_int64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2: Final = _as_int64(0x94D049BB133111EB)
_NUM_BITS: Final = 52
"""Bits of a uniform. With 53, the half step that keeps 0 out would round the top value to 1."""


class Purpose(IntEnum):
    """What a number is for; numbers of different purpose are independent.

    The values are part of the key: changing one changes every seeded text.
    """

    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3
    COUPLED = 4


def uniforms(
    seeds: Tensor, choice: Tensor, position: Tensor, depth: Tensor, purpose: Purpose | Tensor
) -> Tensor:
    """Returns the uniform of each key, in the open interval (0, 1).

    The arguments broadcast against each other as in arithmetic. For the K acceptance uniforms of
    each request pass `seeds[:, None]`, `choice[:, None]`, `position[:, None]` and `arange(K)`.

    Args:
        seeds: int64, the request's seed.
        choice: int64, index of the choice among the n of the request.
        position: int64, position at which the window starts. Never the position of the token:
            the `block` rule looks at uniforms past the place it stops at, and the next window
            must not meet them again (spec_decode/README.md).
        depth: int64, place in the window, counted from 0.
        purpose: what the numbers are for; as int64 values of `Purpose` it broadcasts too, and one
            call draws all the numbers of a window.

    Returns:
        float64 of the broadcast shape, a multiple of 2**-53 in [2**-53, 1 - 2**-53].
    """
    return _to_uniform(_absorb(_stream(seeds, choice, position, purpose), depth))


def gumbel_noise(seeds: Tensor, choice: Tensor, token_position: Tensor, vocab_size: int) -> Tensor:
    """Returns standard Gumbel noise for every token id at a position of the text.

    The key knows nothing of windows, so that plain decoding meets the same noise at the same
    position whatever the number of drafts was.

    Args:
        seeds: [...] int64; broadcasts against the other two.
        choice: [...] int64.
        token_position: [...] int64, position that the token to choose will have.
        vocab_size: V.

    Returns:
        [..., V] float64, finite, between -3.7 and 36.8.
    """
    token_ids = torch.arange(vocab_size, device=seeds.device)
    stream = _stream(seeds, choice, token_position, Purpose.COUPLED)
    noise = _to_uniform(_absorb(stream.unsqueeze(-1), token_ids))
    return noise.log_().neg_().log_().neg_()


def _stream(seeds: Tensor, choice: Tensor, position: Tensor, purpose: Purpose | Tensor) -> Tensor:
    """Hash of the words that all numbers of one stream share."""
    state = _absorb(_absorb(_absorb(torch.zeros_like(seeds), seeds), choice), position)
    return _absorb(state, purpose)


def _absorb(state: Tensor, word: Tensor | int) -> Tensor:
    """Mixes one more word into a hash; for a given state, different words never collide."""
    mixed = (state ^ word) + _GAMMA
    mixed.bitwise_xor_(_shift_right(mixed, 30)).mul_(_MULTIPLIER_1)
    mixed.bitwise_xor_(_shift_right(mixed, 27)).mul_(_MULTIPLIER_2)
    return mixed.bitwise_xor_(_shift_right(mixed, 31))


def _shift_right(word: Tensor, num_bits: int) -> Tensor:
    """Logical shift; torch's own copies the sign bit."""
    return (word >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def _to_uniform(word: Tensor) -> Tensor:
    """The middle of one of 2**52 equal cells of (0, 1), exact in float64."""
    return _shift_right(word, 64 - _NUM_BITS).double().add_(0.5).mul_(2.0**-_NUM_BITS)
