"""One index selection for all draft steps, when requests stop drafting at different depths."""

import pytest

from tests.tiny_engine import (
    Job,
    decode,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
)


@pytest.mark.parametrize("lengths", [(2, 9), (9, 2), (3, 40, 5)])
def test_a_request_may_leave_the_draft_loop(lengths: tuple[int, ...]) -> None:
    """The longest one drafts least, so the shared selection outlives it."""
    model = tiny_model()
    longest = max(lengths)
    jobs = [
        Job(prompt, greedy(24, num_speculative_tokens=1 if len(prompt) == longest else None))
        for prompt in random_prompts(lengths)
    ]
    engine = make_engine(model, 8, index_share_for_mtp_iteration=True)
    got = decode(engine, jobs)
    alone = [decode_alone(model, Job(job.prompt, greedy(24))) for job in jobs]
    assert [one.token_ids for one in got] == [one.token_ids for one in alone]
    assert engine.metrics.num_drafts > 0
