"""When a row of vLLM's matrix is at fault: the limits of `benchmarks.vllm_matrix`."""

import math

from benchmarks.vllm_agreement import Agreement, Comparison

# In nats: a place where two tokens lie closer has no right one in float32.
NEAR_TIE = 1e-4
# How seldom chance alone may call a row of bfloat16 worse than K = 0.
FALSE_ALARM_RATE = 1e-3


def is_worse_than_chance(num_wrong: int, num_plain_wrong: int) -> bool:
    """Whether so many tokens more are wrong than of K = 0 that it is hardly by chance.

    Were both as good, each wrong token would be of either with the probability 1/2.
    """
    total = num_wrong + num_plain_wrong
    ways = sum(math.comb(total, number) for number in range(num_wrong, total + 1))
    return ways / 2**total < FALSE_ALARM_RATE


def faults(comparison: Comparison, row: Agreement, plain: Agreement) -> list[str]:
    """What is wrong with a row, beside K = 0; nothing where all is as it should be."""
    engine = comparison.engine_options
    num_wrong = row.num_tokens - row.num_agreeing
    found = []
    if engine["dtype"] == "float32":
        if num_wrong > 1 or row.largest_gap > NEAR_TIE:
            found.append(f"{num_wrong} tokens are not the float32 engine's")
    else:
        if is_worse_than_chance(num_wrong, plain.num_tokens - plain.num_agreeing):
            found.append(f"{num_wrong} tokens are not the float32 engine's")
        # Where both wrote the same token, it tells nothing of either: one place of a text does.
        if is_worse_than_chance(row.num_only_wrong, row.num_only_plain_wrong):
            found.append(
                f"where one of the two is wrong, K is in {row.num_only_wrong} places and K = 0 in "
                f"{row.num_only_plain_wrong}"
            )
    if engine["enable_prefix_caching"] and row.num_cached_tokens < 3 * engine["block_size"]:
        found.append(f"only {row.num_cached_tokens} tokens came from the prefix cache")
    if row.k and row.mean_acceptance_length <= 1:
        found.append("no draft was accepted")
    if comparison.has_schema and row.k > 1 and not row.num_draft_tokens_missing:
        found.append("the schema cut no draft")
    return found
