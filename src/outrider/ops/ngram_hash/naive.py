"""Reference of the n-gram hash: Python integers, one position at a time."""

from __future__ import annotations


def ngram_rows_naive(
    token_ids: list[int],
    multipliers: list[int],
    head_sizes: list[int],
    head_offsets: list[int],
    eos_token_id: int,
) -> list[list[int]]:
    """Table rows of every position of a whole sequence.

    The gram of size g (2 <= g <= n) hashes the token and its g - 1 predecessors. A predecessor
    is taken as end-of-text when one nearer to the token is end-of-text, or when it would lie
    before the start.

    Args:
        token_ids: the sequence from its start.
        multipliers: n odd integers.
        head_sizes: table size of each head; the heads divide evenly over the gram sizes.
        head_offsets: first row of each head.
        eos_token_id: what fills.

    Returns:
        For each position, one row per head.
    """
    size = len(multipliers)
    heads_per_gram = len(head_sizes) // (size - 1)
    rows = []
    for t in range(len(token_ids)):
        gram = [token_ids[t]]
        for back in range(1, size):
            ended = eos_token_id in gram[1:]
            gram.append(eos_token_id if ended or t < back else token_ids[t - back])
        row = []
        for head, (modulus, offset) in enumerate(zip(head_sizes, head_offsets, strict=True)):
            mixed = 0
            for token, multiplier in zip(
                gram[: head // heads_per_gram + 2], multipliers, strict=False
            ):
                mixed ^= token * multiplier
            row.append(mixed % modulus + offset)
        rows.append(row)
    return rows
