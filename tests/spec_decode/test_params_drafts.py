"""What is drafted follows the request's parameters too, and q is the law it was drawn from.

Every draft of a run is looked at: its law against the head's logits, read by the same parameters in
plain Python, with the tokens emitted and the drafts before it as history.
"""

from collections import defaultdict
from itertools import product

import pytest
import torch
from torch import Tensor

from outrider.batch import DraftTokens, SampledTokens, ScheduledBatch
from outrider.config import RejectionSampleMethod
from outrider.sampling.logits_processors_naive import process_logits_naive
from outrider.sampling_params import SamplingParams
from tests.sampling.test_compute_probs import compute_probs_naive
from tests.spec_decode.table_engine import (
    PROMPT,
    TableEngine,
    Tables,
    make_request,
    random_tables,
)

RULES: list[RejectionSampleMethod] = ["standard", "block", "coupled"]
K, NUM_TOKENS, VOCAB_SIZE = 3, 9, 24
ROUGH = random_tables(1, agreement=0.7, spread=0.7, is_sparse=False, vocab_size=VOCAB_SIZE)
# Rounded to halves, there are ties at every edge.
TABLES = Tables((2 * ROUGH.target).round() / 2, (2 * ROUGH.draft).round() / 2)


class Recorded:
    """A proposer whose drafts are kept, with what each followed.

    Attributes:
        drafts: per request, the output before each draft, its id and its law (None if one-hot).
    """

    def __init__(self, engine: TableEngine) -> None:
        self._proposer = engine.proposer
        engine.proposer = self
        self.drafts: dict[str, list[tuple[list[int], int, Tensor | None]]] = defaultdict(list)

    def propose(
        self, batch: ScheduledBatch, hidden_states: Tensor, result: SampledTokens
    ) -> DraftTokens | None:
        drafts = self._proposer.propose(batch, hidden_states, result)
        for i, request in enumerate(batch.requests if drafts else ()):
            assert drafts is not None
            said = [*request.output_token_ids, *result.output_token_ids[i]]
            for depth in range(drafts.num_drafts[i]):
                token_id = int(drafts.token_ids[i, depth])
                law = None if drafts.probs is None else drafts.probs[i, depth]
                self.drafts[request.request_id].append((list(said), token_id, law))
                said.append(token_id)
        return drafts


def law_after(
    table: Tensor, params: SamplingParams, output: list[int], bad_words: list[list[int]]
) -> list[float]:
    context = [*PROMPT, *output][-2:]
    logits = table[context[0] * VOCAB_SIZE + context[1]].double().tolist()
    scores = process_logits_naive(logits, params, PROMPT, output, (), bad_words)
    return compute_probs_naive(scores, params.temperature, params.top_k, params.top_p, params.min_p)


def run(
    params: list[SamplingParams],
    rule: RejectionSampleMethod,
    num_seeds: int,
    bad_words: list[list[int]],
    draft_sample_method: str = "probabilistic",
) -> dict[str, list[int]]:
    """Texts by request id, seed-index; every draft and every token of theirs is checked."""
    engine = TableEngine(TABLES, rule, K, draft_sample_method=draft_sample_method)
    recorded = Recorded(engine)
    requests = [
        make_request(seed, asked, choice=choice, bad_words=bad_words)
        for choice, asked in enumerate(params)
        for seed in range(num_seeds)
    ]
    texts = dict(zip((r.request_id for r in requests), engine.texts(requests), strict=True))
    assert 0.1 < engine.scheduler.metrics.acceptance_rate < 1
    for request in requests:
        text, asked = texts[request.request_id], request.params
        for place, token_id in enumerate(text):
            assert law_after(TABLES.target, asked, text[:place], bad_words)[token_id] > 0
        assert recorded.drafts[request.request_id]
        for output, token_id, q in recorded.drafts[request.request_id]:
            law = law_after(TABLES.draft, asked, output, bad_words)
            if q is None:
                assert law[token_id] == max(law)
                continue
            assert law[token_id] > 0
            # Its sum is 1, over exactly the ids that it may be drawn from.
            expected = torch.tensor(law, dtype=q.dtype)
            torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(q > 0, expected > 0)
            assert float(q.sum()) == pytest.approx(1, abs=1e-6)
    return texts


@pytest.mark.parametrize("rule", RULES)
def test_filters(rule: RejectionSampleMethod) -> None:
    """With a top_k of one, all three rules are greedy."""
    filters = list(product((1, 2, 20, VOCAB_SIZE), (0.1, 0.9, 1.0)))
    params = [SamplingParams(top_k=k, top_p=p, max_tokens=NUM_TOKENS) for k, p in filters]
    texts = run(params, rule, 4, [])
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    (expected,) = TableEngine(TABLES, rule, 0).texts([make_request(0, greedy)])
    for choice, (top_k, _) in enumerate(filters):
        if top_k == 1:
            assert [texts[f"{seed}-{choice}"] for seed in range(4)] == [expected] * 4
    assert len({tuple(text) for text in texts.values()}) > 20


@pytest.mark.parametrize("rule", RULES)
def test_biases(rule: RejectionSampleMethod) -> None:
    """An id that is banned, and one that is all that is left."""
    options = {"min_p": 0.2, "max_tokens": NUM_TOKENS}
    likely = int(TABLES.target.mean(0).argmax())
    params = [
        SamplingParams(logit_bias={likely: -100}, **options),
        SamplingParams(logit_bias={7: 100}, **options),
        SamplingParams(**options),
    ]
    texts = run(params, rule, 20, [])
    banned, left, free = ([texts[f"{seed}-{i}"] for seed in range(20)] for i in range(3))
    assert not any(likely in text for text in banned)
    assert any(likely in text for text in free)
    assert left == [[7] * NUM_TOKENS] * 20


@pytest.mark.parametrize("rule", RULES)
def test_what_looks_at_the_text(rule: RejectionSampleMethod) -> None:
    """Beside requests that use nothing of it."""
    params = [
        SamplingParams(max_tokens=NUM_TOKENS),
        SamplingParams(repetition_penalty=2, max_tokens=NUM_TOKENS),
        SamplingParams(frequency_penalty=1, presence_penalty=-2, max_tokens=NUM_TOKENS),
    ]
    words = [[3], *([a, b] for a in range(8) for b in range(4, VOCAB_SIZE, 2))]
    run(params, rule, 12, words)
    run(params, rule, 12, [])


def test_one_hot_drafts() -> None:
    """At temperature 0 and where drafts are taken without a draw."""
    options = {"presence_penalty": 1.5, "max_tokens": NUM_TOKENS}
    words = [[a, b] for a in range(VOCAB_SIZE) for b in range(0, VOCAB_SIZE, 3)]
    run([SamplingParams(temperature=0, **options)], "block", 1, words)
    run([SamplingParams(**options)], "block", 12, words, "greedy")
