"""The law of texts that follow a grammar, by the engine's own step over tables.

Drafts are masked as they are drawn, every row that verifies them is masked, and the matcher rolls
back with the rows. The law is that of drawing token by token from the target, masked and
renormalised: it is enumerated, and each rule is tested against it by chi-square, which passes above
1e-6. Under `coupled` and at temperature 0 the very texts are those of K = 0.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.batch import DraftTokens, SampledTokens, ScheduledBatch
from outrider.config import RejectionSampleMethod
from outrider.request import Request
from outrider.sampling_params import SamplingParams
from tests.chi_square import chi_square_p_value
from tests.grammar.toy_grammar import EDGES, END, allowed_ids, toy_path
from tests.spec_decode.table_engine import PROMPT, TableEngine, make_request, random_tables

PASSES = 1e-6
LENGTH = 6
TABLES = random_tables(5, agreement=0.6, spread=0.8, is_sparse=False, vocab_size=4)
PARAMS = SamplingParams(temperature=1, max_tokens=LENGTH, stop_token_ids=[END])


def grammar_requests(params: SamplingParams, num_texts: int) -> list[Request]:
    return [replace(make_request(seed, params), grammar=toy_path()) for seed in range(num_texts)]


def exact_law(target: Tensor, prefix: Sequence[int] = ()) -> dict[tuple[int, ...], float]:
    """Of all texts that begin so, by their probability after it."""
    allowed = allowed_ids(EDGES, prefix)
    if allowed is None or len(prefix) == LENGTH:
        return {tuple(prefix): 1.0}
    before = [*PROMPT, *prefix]
    logits = target[before[-2] * target.shape[1] + before[-1]].double()
    mask = torch.tensor([token_id in allowed for token_id in range(len(logits))])
    probs = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    law: dict[tuple[int, ...], float] = {}
    for token_id in sorted(allowed):
        for text, prob in exact_law(target, [*prefix, token_id]).items():
            law[text] = law.get(text, 0.0) + prob * float(probs[token_id])
    return law


def p_value(texts: Sequence[Sequence[int]]) -> float:
    """Of texts against the law; those that are seldom count as one."""
    law = exact_law(TABLES.target)
    counts = Counter(map(tuple, texts))
    assert set(counts) <= set(law), "a text that the grammar refuses"
    often = [text for text, prob in law.items() if prob * len(texts) >= 10]
    observed = [counts[text] for text in often]
    probs = [law[text] for text in often]
    observed.append(len(texts) - sum(observed))
    probs.append(1 - sum(probs))
    return chi_square_p_value(torch.tensor(observed), torch.tensor(probs, dtype=torch.float64))


@pytest.mark.parametrize("num_speculative_tokens", [1, 3])
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_the_law_is_that_of_the_masked_target(
    rule: RejectionSampleMethod, num_speculative_tokens: int
) -> None:
    engine = TableEngine(TABLES, rule, num_speculative_tokens)
    texts = engine.texts(grammar_requests(PARAMS, 8_000))
    assert p_value(texts) > PASSES
    assert 0.2 < engine.scheduler.metrics.acceptance_rate < 0.95


@pytest.mark.parametrize("temperature", [0, 1])
def test_texts_are_those_of_plain_decoding(temperature: float) -> None:
    params = replace(PARAMS, temperature=temperature)
    num_texts = 2_000 if temperature else 1
    plain = TableEngine(TABLES, "coupled", 0).texts(grammar_requests(params, num_texts))
    assert all(len(text) == LENGTH or text[-1] == END for text in plain)
    for num_speculative_tokens in (1, 2, 5):
        engine = TableEngine(TABLES, "coupled", num_speculative_tokens)
        assert engine.texts(grammar_requests(params, num_texts)) == plain


def test_every_draft_is_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that likes what the grammar refuses drafts what it likes next."""
    liking = torch.zeros_like(TABLES.draft)
    liking[:, 1] = 9.0
    engine = TableEngine(replace(TABLES, draft=liking), "standard", 3)
    propose, drafted = engine.proposer.propose, Counter[int]()

    def spy(batch: ScheduledBatch, states: Tensor, result: SampledTokens) -> DraftTokens | None:
        drafts = propose(batch, states, result)
        if drafts is not None:
            rows = zip(batch.requests, result.output_token_ids, drafts.token_ids, strict=True)
            for i, (request, new_ids, row) in enumerate(rows):
                text = [*request.output_token_ids, *new_ids]
                for token_id in row[: drafts.num_drafts[i]].tolist():
                    allowed = allowed_ids(EDGES, text)
                    assert allowed is None or token_id in allowed
                    drafted[token_id] += allowed is not None
                    text.append(token_id)
        return drafts

    monkeypatch.setattr(engine.proposer, "propose", spy)
    engine.texts(grammar_requests(PARAMS, 300))
    assert drafted[1] > 200
    assert drafted[2] > 200


def test_requests_without_a_grammar_are_what_they_are_alone() -> None:
    """To the bit: a mask touches no row but those of its request."""
    params = replace(PARAMS, repetition_penalty=1.3)
    alone = TableEngine(TABLES, "block", 3).texts(
        [make_request(seed, params) for seed in range(300)]
    )
    mixed = [
        replace(make_request(seed, params, choice=1), grammar=toy_path()) for seed in range(300)
    ]
    together = TableEngine(TABLES, "block", 3).texts(
        [make_request(seed, params) for seed in range(300)] + mixed
    )
    assert together[:300] == alone
    assert together[300:] != alone


def test_the_grammar_decides_where_a_bad_word_leaves_nothing() -> None:
    """After a 1 the grammar wants a 2, which is also the only bad word."""
    requests = [
        replace(make_request(seed, PARAMS, bad_words=[[2]]), grammar=toy_path())
        for seed in range(400)
    ]
    texts = TableEngine(TABLES, "standard", 3).texts(requests)
    pairs = {pair for text in texts for pair in zip([None, *text], text, strict=False)}
    assert {pair for pair in pairs if pair[1] == 2} == {(1, 2)}
