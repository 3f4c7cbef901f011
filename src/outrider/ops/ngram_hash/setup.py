"""Constants of the n-gram hash: table sizes and multipliers as functions of the configuration.

A checkpoint stores the same integers in its three hash buffers, so the loader can compare them.
"""

from __future__ import annotations

import math
from functools import lru_cache

_MASK64 = (1 << 64) - 1
_MAX_INT64 = (1 << 63) - 1
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15
_SEED_STRIDE = 10007
# Deterministic for every n below 3.3e24 (Sorenson and Webster 2015), far above any int64.
_MILLER_RABIN_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def splitmix64(value: int) -> int:
    """Next output of the splitmix64 generator whose state is `value` (Steele et al. 2014)."""
    value = (value + _SPLITMIX_GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def is_prime(value: int) -> bool:
    """Whether `value` is prime: exact for every int64."""
    if value < 2:
        return False
    for base in _MILLER_RABIN_BASES:
        if value % base == 0:
            return value == base
    odd, twos = value - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _MILLER_RABIN_BASES:
        power = pow(base, odd, value)
        if power in (1, value - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % value
            if power == value - 1:
                break
        else:
            return False
    return True


@lru_cache(maxsize=64)
def consecutive_primes(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are `start` or larger."""
    primes: list[int] = []
    candidate = start
    while len(primes) < count:
        if is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(primes)


def head_vocab_sizes(base: int, num_heads: int, ple_index: int) -> tuple[int, ...]:
    """Rows of each hashed head of one PLE layer.

    The prime list runs on over the PLE layers, so their tables differ in size.

    Args:
        base: lower bound of the first prime.
        num_heads: (ngram_size - 1) * heads_per_ngram.
        ple_index: rank of the layer among the PLE layers, from 0.
    """
    return consecutive_primes(base, num_heads * (ple_index + 1))[num_heads * ple_index :]


def head_offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """First row of each head inside the joint table: running sums that start at 0."""
    offsets = [0]
    for size in sizes[:-1]:
        offsets.append(offsets[-1] + size)
    return tuple(offsets)


def layer_multipliers(
    vocab_size: int, ngram_size: int, ple_index: int, seed: int
) -> tuple[int, ...]:
    """One odd multiplier per token of the n-gram.

    Bounded so that multiplier * token id stays below 2^63 for every id of the vocabulary.
    """
    half_bound = max(1, _MAX_INT64 // max(vocab_size, 1) // 2)
    base = seed + _SEED_STRIDE * ple_index
    return tuple(
        2 * (splitmix64((base + _SPLITMIX_GAMMA * (i + 1)) & _MASK64) % half_bound) + 1
        for i in range(ngram_size)
    )


def padded_table_rows(sizes: tuple[int, ...], divisible_by: int) -> int:
    """Rows of the joint table, rounded up to a multiple of `divisible_by`."""
    return math.ceil(sum(sizes) / divisible_by) * divisible_by
