"""An id without a token in the tokenizer is never drafted, never emitted and in no prompt."""

from functools import cache

import pytest

from outrider.engine.engine import LLMEngine
from outrider.errors import RequestError
from outrider.sampling_params import SamplingParams
from tests.piece_tokenizer import piece_tokenizer
from tests.tiny_engine import (
    VOCAB_SIZE,
    Job,
    decode,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
)

NUM_PROMPTS, MAX_TOKENS, NUM_PADDING = 4, 24, 4

model = cache(tiny_model)


@cache
def missing_ids() -> frozenset[int]:
    """Of what the model would say, every other id, and what pads the vocabulary."""
    said = {
        token_id
        for prompt in random_prompts([5 + i for i in range(NUM_PROMPTS)])
        for token_id in decode_alone(model(), Job(prompt, greedy(MAX_TOKENS))).token_ids
    }
    last = VOCAB_SIZE - NUM_PADDING - 1
    return frozenset(sorted(said - {last})[::2]) | set(range(last + 1, VOCAB_SIZE))


def engine(k: int, **options: str) -> LLMEngine:
    pieces = [None if i in missing_ids() else str(i).encode() for i in range(VOCAB_SIZE)]
    return make_engine(model(), k, piece_tokenizer(pieces[:-NUM_PADDING]), **options)


def jobs(temperature: float, rule: str) -> list[Job]:
    given = [i for i in range(VOCAB_SIZE) if i not in missing_ids()]
    prompts = [[given[i % len(given)] for i in ids] for ids in random_prompts([5, 9, 13, 18])]
    return [
        Job(
            prompt,
            SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                rejection_sample_method=rule,  # type: ignore[arg-type]
            ),
        )
        for seed, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("method", ["mtp", "ngram"])
@pytest.mark.parametrize(
    ("temperature", "rule"), [(0.0, "block"), (2.0, "standard"), (2.0, "block"), (2.0, "coupled")]
)
def test_none_is_emitted(method: str, temperature: float, rule: str) -> None:
    drafted = decode(engine(3, method=method), jobs(temperature, rule))
    plain = decode(engine(0), jobs(temperature, rule))
    for result in (*drafted, *plain):
        assert missing_ids().isdisjoint(result.token_ids)
        assert len(result.token_ids) == MAX_TOKENS
    if temperature == 0 or rule == "coupled":
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]


def test_requests_that_name_one_are_refused() -> None:
    one = min(missing_ids())
    with pytest.raises(RequestError, match=f"^token id {one} has no token in the tokenizer$"):
        engine(0).check_request([one], greedy(1))
    message = f"^token id {one} in logit_bias has no token in the tokenizer$"
    with pytest.raises(RequestError, match=message):
        engine(0).check_request(
            [min(set(range(9)) - missing_ids())], greedy(1, logit_bias={one: 1})
        )
