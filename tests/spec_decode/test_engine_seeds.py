"""What a seed fixes: the text of a request, in any company, and under `coupled` at any K."""

from itertools import product

import pytest

from outrider.config import RejectionSampleMethod
from outrider.sampling_params import SamplingParams
from tests.spec_decode.table_engine import TableEngine, make_request, random_tables
from tests.tiny_engine import Job, decode, make_engine, tiny_model

TABLES = random_tables(3, agreement=0.7, spread=0.7, is_sparse=False)
PARAMS = SamplingParams(temperature=0.8, max_tokens=24)
RULES: list[RejectionSampleMethod] = ["standard", "block", "coupled"]
OTHERS = [
    SamplingParams(temperature=0, max_tokens=7),
    SamplingParams(temperature=2, max_tokens=30, rejection_sample_method="standard"),
    SamplingParams(temperature=1, max_tokens=2, rejection_sample_method="block", top_k=2),
    SamplingParams(temperature=1, max_tokens=19, num_speculative_tokens=1, min_p=0.2),
    SamplingParams(temperature=0.3, max_tokens=25, rejection_sample_method="coupled"),
    SamplingParams(temperature=1, max_tokens=40, num_speculative_tokens=0),
]


def texts_alone(rule: RejectionSampleMethod, num_speculative_tokens: int) -> list[list[int]]:
    engine = TableEngine(TABLES, rule, num_speculative_tokens)
    return [engine.texts([make_request(seed, PARAMS)])[0] for seed in range(8)]


@pytest.mark.parametrize("max_num_batched_tokens", [4, 9, 15, 1000])
@pytest.mark.parametrize("rule", RULES)
def test_company_does_not_change_a_text(
    rule: RejectionSampleMethod, max_num_batched_tokens: int
) -> None:
    """Requests of all kinds join and leave, in steps with room for one window, a few, all."""
    requests = []
    for seed in range(8):
        requests.append(make_request(seed, PARAMS))
        for i, params in enumerate(OTHERS[seed % 3 :: 3]):
            prompt = [0, 1, 2, 2, 1, 0, 1][seed % 3 :]
            requests.append(make_request(100 + 10 * seed + i, params, prompt=prompt))
    engine = TableEngine(
        TABLES, rule, 3, max_num_seqs=5, max_num_batched_tokens=max_num_batched_tokens
    )
    assert engine.texts(requests)[::3] == texts_alone(rule, 3)


def test_k_does_not_change_a_text_under_coupled() -> None:
    plain = texts_alone("coupled", 0)
    assert all(texts_alone("coupled", k) == plain for k in range(1, 9))


@pytest.mark.parametrize("rule", RULES)
def test_seeds_and_choices_have_texts_of_their_own(rule: RejectionSampleMethod) -> None:
    keys = list(product((0, 1, 2, 2**63 - 1), range(3)))
    requests = [make_request(seed, PARAMS, choice=choice) for seed, choice in keys]
    texts = TableEngine(TABLES, rule, 3).texts(requests)
    assert len(set(map(tuple, texts))) == len(keys)


def test_requests_without_a_seed_draw_entropy() -> None:
    model = tiny_model()
    job = Job([5, 6, 7], SamplingParams(temperature=1, max_tokens=16, ignore_eos=True))
    results = [*decode(make_engine(model, 3), [job] * 4), *decode(make_engine(model, 3), [job] * 4)]
    assert len({tuple(result.token_ids) for result in results}) == len(results)
