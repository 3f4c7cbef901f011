"""The law of texts whose drafts were dropped before anybody looked at them.

A request gives way when blocks run out, or because a step has failed. Both depend on how many
tokens others have and how many drafts they wait for, and not on what the drafts are.
"""

from collections.abc import Callable

import pytest
import torch

from outrider.config import RejectionSampleMethod
from outrider.request import Request
from outrider.sampling_params import SamplingParams
from tests.spec_decode.table_engine import TableEngine, collector_at_rest, make_request
from tests.spec_decode.test_engine_law import DENSE, FAILS, PASSES, SPARSE, TOY, exact_law

# Under `coupled` the texts are compared one by one: tests/engine/test_preemption.py.
RULES: list[RejectionSampleMethod] = ["standard", "block"]
K, NUM_TEXTS, MAX_NUM_SEQS = 3, 8000, 500


class Failure(Exception):
    pass


@pytest.mark.parametrize("rule", RULES)
def test_texts_that_gave_way(rule: RejectionSampleMethod) -> None:
    """Blocks for about two thirds of what all that run would need."""
    params = SamplingParams(temperature=1, max_tokens=14)
    engine = TableEngine(SPARSE, rule, K, max_num_seqs=MAX_NUM_SEQS, num_blocks=5 * MAX_NUM_SEQS)
    texts = engine.sample_texts(params, NUM_TEXTS)
    assert engine.scheduler.num_preemptions > NUM_TEXTS // 20
    assert 0.1 < engine.scheduler.metrics.acceptance_rate < 0.9
    assert exact_law(SPARSE, params).p_value(texts) > PASSES
    engine.cache_manager.check_integrity()
    assert engine.cache_manager.num_free_rows == MAX_NUM_SEQS


@pytest.mark.parametrize("rule", RULES)
def test_texts_of_steps_that_failed(rule: RejectionSampleMethod) -> None:
    """Every third step fails after it was judged which drafts stay; all begin again."""
    params = SamplingParams(temperature=1, max_tokens=8)
    engine = TableEngine(DENSE, rule, K)
    propose, turn = engine.proposer.propose, 0

    def failing(batch: object, hidden_states: object, result: object) -> object:
        nonlocal turn
        turn += 1
        if turn % 3 == 0:
            raise Failure
        return propose(batch, hidden_states, result)  # type: ignore[arg-type]

    engine.proposer.propose = failing  # type: ignore[method-assign, assignment]
    texts: dict[str, list[int]] = {}
    for first in range(0, NUM_TEXTS, 4000):
        for seed in range(first, first + 4000):
            request = make_request(seed, params)
            texts[request.request_id] = []
            engine.scheduler.add(request)
        with collector_at_rest():
            while engine.scheduler.has_unfinished_requests:
                try:
                    outputs = engine.step()
                except Failure:
                    engine.scheduler.cancel_step()
                    continue
                for output in outputs:
                    texts[output.request_id] += output.new_token_ids
    assert engine.scheduler.num_preemptions > NUM_TEXTS
    assert exact_law(DENSE, params).p_value(torch.tensor(list(texts.values()))) > PASSES


def p_value_of_dropping(is_dropped: Callable[[Request, int], bool]) -> float:
    """Of texts under `block` at K = 2, where some requests lose their drafts before each step."""
    params = SamplingParams(temperature=1, max_tokens=6)
    engine = TableEngine(TOY, "block", 2)
    schedule = engine.scheduler.schedule

    def dropping() -> object:
        drafts = engine.scheduler._drafts
        for request in engine.scheduler._running:
            if request.num_drafts:
                assert drafts is not None
                if is_dropped(request, int(drafts.token_ids[request.draft_index, 0])):
                    request.num_drafts = 0
        return schedule()

    engine.scheduler.schedule = dropping  # type: ignore[method-assign, assignment]
    return exact_law(TOY, params).p_value(engine.sample_texts(params, NUM_TEXTS))


def test_drafts_dropped_for_their_number_and_for_their_values() -> None:
    """What must not be is seen: the same share of drafts, chosen by what was drawn."""
    by_coin = p_value_of_dropping(
        lambda request, _: (request.seed + request.num_output_tokens) % 3 == 0
    )
    assert by_coin > PASSES
    assert p_value_of_dropping(lambda _, draft: draft == 0) < FAILS
