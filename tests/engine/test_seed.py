"""`EngineConfig.seed`: requests without a seed of their own are reproducible, and differ."""

import pytest

from outrider.sampling_params import SamplingParams
from tests.tiny_engine import Job, decode, make_engine, random_prompts, tiny_model

MODEL = tiny_model()


def texts(engine_seed: int | None, *seeds: int | None) -> list[list[int]]:
    """What requests of one prompt say, one after another."""
    engine = make_engine(MODEL, k=2, seed=engine_seed, max_num_seqs=len(seeds))
    (prompt,) = random_prompts([5])
    params = [SamplingParams(seed=seed, max_tokens=16, ignore_eos=True) for seed in seeds]
    return [one.token_ids for one in decode(engine, [Job(prompt, one) for one in params])]


def test_the_seed_of_the_engine_makes_requests_reproducible_and_distinct() -> None:
    first = texts(7, None, None)
    assert texts(7, None, None) == first
    assert first[0] != first[1]


@pytest.mark.parametrize("other", [8, -7, None])
def test_another_seed_gives_other_texts(other: int | None) -> None:
    assert texts(7, None) != texts(other, None)


def test_a_request_keeps_its_own_seed() -> None:
    assert texts(7, 3) == texts(8, 3) == texts(None, 3)


def test_without_any_seed_texts_differ() -> None:
    assert texts(None, None) != texts(None, None)
