"""The counters against a trace counted by hand."""

import pytest

from outrider.spec_decode import SpecDecodeMetrics

# Steps of three requests at K = 3: valid drafts, drafts the rule kept, tokens emitted.
TRACE = [
    (3, 3, 4),  # all kept, and a bonus token
    (3, 0, 1),  # the first one rejected
    (3, 1, 2),
    (1, 1, 2),  # [5, -1, -1]: one valid draft, kept; the token at the placeholder is none
    (0, 0, 1),  # [-1, -1, -1]: no draft at all
    (0, 0, 1),  # K = 0
    (2, 1, 2),  # clipped near the cap
    (3, 3, 2),  # end of text as the second kept draft: the third, kept too, was never emitted
    (3, 2, 3),  # end of text as the recovered token: nothing is cut
    (3, 2, 1),  # the cap cuts after the first kept draft
    (3, 0, 1),
    (3, 1, 0),  # aborted before anything was emitted
]


def observed(
    steps: list[tuple[int, int, int]], num_speculative_tokens: int = 3
) -> SpecDecodeMetrics:
    metrics = SpecDecodeMetrics(num_speculative_tokens)
    for step in steps:
        metrics.observe(*step)
    return metrics


def test_hand_counted_trace() -> None:
    metrics = observed(TRACE)
    assert metrics.num_target_passes == 12
    assert metrics.num_drafts == 10  # neither the placeholders alone nor K = 0
    assert metrics.num_draft_tokens == 8 * 3 + 1 + 2
    assert metrics.num_accepted_tokens == 3 + 0 + 1 + 1 + 1 + 2 + 2 + 1 + 0 + 0
    assert metrics.num_emitted_tokens == 4 + 1 + 2 + 2 + 1 + 1 + 2 + 2 + 3 + 1 + 1 + 0
    assert metrics.num_draft_tokens_per_pos == [10, 9, 8]
    assert metrics.num_accepted_tokens_per_pos == [7, 3, 1]
    assert metrics.acceptance_rate_per_pos == [7 / 10, 3 / 9, 1 / 8]
    assert metrics.to_dict() == {
        "num_drafts": 10,
        "num_draft_tokens": 27,
        "num_accepted_tokens": 11,
        "num_accepted_tokens_per_pos": [7, 3, 1],
        "mean_acceptance_length": 1 + 11 / 10,
        "acceptance_rate": 11 / 27,
        "tokens_per_target_pass": 20 / 12,
    }


def test_acceptance_rate_is_not_the_share_of_the_limit() -> None:
    """3.65 of 4 tokens is an acceptance rate of 88.3 %, not 91 %."""
    metrics = observed([(3, 3, 4)] * 13 + [(3, 2, 3)] * 7)
    assert metrics.mean_acceptance_length == pytest.approx(3.65)
    assert metrics.acceptance_rate == pytest.approx(0.8833, abs=1e-4)
    assert metrics.tokens_per_target_pass == pytest.approx(3.65)


@pytest.mark.parametrize("split", range(len(TRACE) + 1))
def test_merge_adds(split: int) -> None:
    metrics = observed(TRACE[:split])
    metrics.merge(observed(TRACE[split:]))
    assert metrics == observed(TRACE)


def test_positions_grow_with_the_drafts() -> None:
    short, long = observed([(1, 1, 2)], 1), observed([(5, 4, 5)], 0)
    assert long.num_accepted_tokens_per_pos == [1, 1, 1, 1, 0]
    short.merge(long)
    assert short.num_draft_tokens_per_pos == [2, 1, 1, 1, 1]
    assert short.num_accepted_tokens_per_pos == [2, 1, 1, 1, 0]
    long.merge(observed([(1, 0, 1)], 1))
    assert long.num_draft_tokens_per_pos == [2, 1, 1, 1, 1]


def test_without_drafts() -> None:
    for metrics in (SpecDecodeMetrics(), observed([(0, 0, 1)] * 5, 0)):
        assert metrics.mean_acceptance_length == 1
        assert metrics.acceptance_rate == 0
        assert metrics.acceptance_rate_per_pos == []
    assert SpecDecodeMetrics().tokens_per_target_pass == 0
    assert observed([(0, 0, 1)] * 5).tokens_per_target_pass == 1
    assert observed([(0, 0, 1)] * 5, 3).acceptance_rate_per_pos == [0, 0, 0]


def test_to_dict_is_a_copy() -> None:
    metrics = observed(TRACE)
    metrics.to_dict()["num_accepted_tokens_per_pos"].append(1)
    assert len(metrics.num_accepted_tokens_per_pos) == 3


@pytest.mark.parametrize("step", [(2, 3, 4), (3, 1, 3), (3, -1, 0), (3, 1, -1)])
def test_impossible_steps_are_refused(step: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        observed([step])
