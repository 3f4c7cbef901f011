"""Who runs, with how many rows and blocks, and who gives way: without a model."""

import gc
import weakref

import pytest

from tests.engine.scripted_steps import BLOCK_SIZE, ScriptedSteps


def test_a_prompt_in_pieces_beside_windows() -> None:
    """Windows come first, whoever came first: no draft is left out for the rows of a prompt."""
    steps = ScriptedSteps(3, 100, max_num_batched_tokens=16)
    steps.add("a", 6, 30)
    steps.add("long", 40, 5)
    steps.add("b", 3, 30)
    assert steps.step() == {"a": (0, 6, 0), "long": (0, 10, 0)}
    assert steps.step() == {"a": (6, 1, 3), "long": (10, 12, 0)}
    assert steps.step() == {"a": (10, 1, 3), "long": (22, 12, 0)}
    assert steps.step() == {"a": (14, 1, 3), "long": (34, 6, 0), "b": (0, 3, 0)}
    assert steps.step() == {"a": (18, 1, 3), "long": (40, 1, 3), "b": (3, 1, 3)}


@pytest.mark.parametrize("threshold", [1, 3, 7])
def test_the_rows_of_one_prompt_in_a_step(threshold: int) -> None:
    """At most so many, of each; the others find room beside it."""
    steps = ScriptedSteps(2, 100, long_prefill_token_threshold=threshold)
    for name, length in (("a", 20), ("b", 5), ("c", 2)):
        steps.add(name, length, 4)
    seen = dict.fromkeys("abc", 0)
    while steps.scheduler.has_unfinished_requests:
        for name, (start, num_certain, num_drafts) in steps.step().items():
            length = steps.requests[name].num_prompt_tokens
            if start < length:
                assert start == seen[name]
                assert (num_certain, num_drafts) == (min(threshold, length - start), 0)
                seen[name] += num_certain
    assert seen == {"a": 20, "b": 5, "c": 2}


def test_a_later_window_beside_a_long_prompt() -> None:
    """With a threshold a later request can be past its prompt before an earlier one is."""
    steps = ScriptedSteps(3, 100, max_num_batched_tokens=12, long_prefill_token_threshold=11)
    steps.add("long", 60, 5)
    steps.add("short", 1, 30)
    assert steps.step() == {"long": (0, 11, 0), "short": (0, 1, 0)}
    assert steps.step() == {"long": (11, 8, 0), "short": (1, 1, 3)}
    assert steps.step() == {"long": (19, 8, 0), "short": (5, 1, 3)}


def test_as_many_run_as_have_room_for_their_windows() -> None:
    steps = ScriptedSteps(3, 100, max_num_batched_tokens=11)
    for name in "abc":
        steps.add(name, 1, 9)
    steps.step()
    assert (steps.running, steps.waiting) == (["a", "b"], ["c"])
    assert steps.step() == {"a": (1, 1, 3), "b": (1, 1, 3)}


def test_blocks_are_taken_as_a_request_grows() -> None:
    """Those of its tokens and a window, never those of its whole length."""
    k = 3
    steps = ScriptedSteps(k, 100)
    steps.add("a", 10, 60)
    most = 0
    while steps.scheduler.has_unfinished_requests:
        steps.schedule()
        held = steps.blocks("a") * BLOCK_SIZE
        num_tokens = len(steps.requests["a"].token_ids)
        # Rows of the window, and of the head after it.
        needed = min(num_tokens + k + k - 1, 70)
        assert needed <= held < max(needed, 10 + 2 * k) + BLOCK_SIZE
        most = max(most, held)
        steps.finish(lambda name, drafts: drafts // 2)
    assert 70 <= most < 70 + BLOCK_SIZE
    assert steps.num_free_blocks == 100


@pytest.mark.parametrize(("asked", "num_tokens"), [(0, 11), (1, 12), (3, 16), (None, 16)])
def test_room_at_admission(asked: int | None, num_tokens: int) -> None:
    """All tokens, a window of the request's own K, and the head's rows after it."""
    steps = ScriptedSteps(3, 100)
    steps.add("a", 10, 60, num_speculative_tokens=asked)
    steps.schedule()
    assert steps.blocks("a") == -(-num_tokens // BLOCK_SIZE)


def test_the_last_who_came_gives_way() -> None:
    """In the order of arrival, reversed, and only for those that came before it."""
    steps = ScriptedSteps(0, 12)
    for name in "abc":
        steps.add(name, 6, 40)
    rows = {name: [] for name in "abc"}
    while not steps.requests["a"].num_preemptions and steps.scheduler.has_unfinished_requests:
        before = len(steps.requests["c"].token_ids)
        for name in steps.step():
            rows[name].append(len(steps.requests[name].token_ids))
        assert steps.running + steps.waiting == sorted(steps.running + steps.waiting)
        if steps.requests["c"].num_preemptions == 1 and "c" in steps.waiting:
            assert len(steps.requests["c"].token_ids) == before, "it keeps what it has"
            assert steps.requests["c"].num_computed_tokens == 0
    assert steps.requests["a"].num_preemptions == 0
    # The first got on in every step.
    assert rows["a"] == list(range(7, 47))
    assert steps.requests["c"].num_preemptions >= steps.requests["b"].num_preemptions > 0
    assert steps.scheduler.num_preemptions == sum(
        request.num_preemptions for request in steps.requests.values()
    )
    assert all(len(request.token_ids) == 46 for request in steps.requests.values())
    assert steps.num_free_blocks == 12


def test_a_request_gives_way_itself_where_it_came_last() -> None:
    """Its output is kept, and is run again as one prompt, without the drafts that it had."""
    steps = ScriptedSteps(2, 9)
    steps.add("a", 9, 20)
    steps.add("b", 7, 20)
    while not steps.requests["b"].num_preemptions:
        assert steps.scheduler.has_unfinished_requests
        drafts = steps.requests["b"].num_drafts
        steps.step(lambda name, drafts: 0)
    b = steps.requests["b"]
    assert drafts == 2
    assert (b.row, b.num_computed_tokens, b.num_drafts) == (None, 0, 0)
    num_tokens = len(b.token_ids)
    assert num_tokens > 8
    while b.row is None:
        rows = steps.step()
        assert len(b.token_ids) == num_tokens + ("b" in rows)
    assert rows["b"] == (0, num_tokens, 0)
    steps.run()
    assert [len(r.token_ids) for r in steps.requests.values()] == [29, 27]


def test_nobody_is_let_in_beside_what_gave_way() -> None:
    """Not in that step, and not before whoever gave way."""
    steps = ScriptedSteps(0, 9)
    steps.add("a", 12, 12)
    steps.add("b", 12, 12)
    steps.add("c", 1, 2)
    steps.schedule()
    assert (steps.running, steps.waiting) == (["a", "b"], ["c"])
    steps.finish()
    while not steps.requests["b"].num_preemptions:
        assert steps.scheduler.has_unfinished_requests
        assert steps.waiting == ["c"]
        steps.step()
    assert (steps.running, steps.waiting) == (["a"], ["b", "c"])
    steps.run()
    assert steps.requests["c"].num_preemptions == 0


def test_everybody_that_runs_keeps_a_block_to_grow() -> None:
    """A newcomer that would take the last block has to wait; one for whom all is there does not."""
    steps = ScriptedSteps(0, 4)
    steps.add("a", 5, 11)
    steps.add("b", 7, 1)
    steps.step()
    assert (steps.running, steps.waiting) == (["a"], ["b"])
    other = ScriptedSteps(0, 4)
    other.add("a", 5, 3)  # two blocks hold all of it
    other.add("b", 7, 1)
    other.schedule()
    assert other.running == ["a", "b"]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("num_blocks", [11, 14, 20])
def test_giving_way_is_rare(k: int, num_blocks: int) -> None:
    """It costs fewer rows than the requests have, since nobody is let in for a block or two."""
    steps = ScriptedSteps(k, num_blocks)
    for name in "abcdef":
        steps.add(name, 4, 40)
    num_rows = 0
    while steps.scheduler.has_unfinished_requests:
        num_rows += sum(num_certain + drafts for _, num_certain, drafts in steps.step().values())
    assert steps.scheduler.num_preemptions > 0
    assert max(request.num_preemptions for request in steps.requests.values()) <= 2
    assert num_rows < 2 * 6 * 44


def test_a_request_that_could_never_run_is_no_request() -> None:
    with pytest.raises(AssertionError, match="can never run"):
        ScriptedSteps(0, 4).add("a", 8, 9)


def test_a_step_within_a_step() -> None:
    steps = ScriptedSteps(0, 4)
    steps.add("a", 5, 3)
    steps.schedule()
    with pytest.raises(AssertionError, match="the step before has not ended"):
        steps.schedule()


@pytest.mark.parametrize("way", ["end", "abort", "preempt", "cancel"])
def test_the_last_drafts_are_not_kept(way: str) -> None:
    """Their laws may be large: they go with the last request that waited for them."""
    steps = ScriptedSteps(2, 12)
    steps.add("a", 4, 6)
    steps.step()
    drafts = steps.scheduler._drafts
    assert drafts is not None
    alive = weakref.ref(drafts)
    del drafts
    if way == "end":
        steps.run()
    elif way == "abort":
        steps.scheduler.abort("a")
    elif way == "cancel":
        steps.schedule()
        del steps.batch
        steps.scheduler.cancel_step()
    else:
        steps.scheduler._preempt_last()
        steps.step()
        assert steps.requests["a"].num_preemptions == 1
    steps.batch = None
    gc.collect()
    assert alive() is None
