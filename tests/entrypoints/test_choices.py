"""Several completions of a prompt, and what a seed fixes, on a model whose head is often right."""

from collections.abc import Sequence

import pytest

from outrider import SamplingParams
from outrider.engine.engine import LLMEngine
from outrider.entrypoints.output_processor import OutputProcessor
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.outputs import RequestOutput
from outrider.spec_decode.metrics import SpecDecodeMetrics
from tests.tiny_engine import make_engine, random_prompts, tiny_model

RULES = ("standard", "block", "coupled")
PROMPT, *OTHERS = random_prompts([9, 3, 12, 7, 5, 8, 4, 10])


@pytest.fixture(scope="module")
def model() -> Qwen4ExpForCausalLM:
    return tiny_model()


def sampled(max_tokens: int = 12, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]


def complete(
    engine: LLMEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Runs requests together to their ends; the results are in the order of the prompts."""
    processor = OutputProcessor(engine)
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        processor.add_request(str(index), EncodedPrompt(prompt), one)
    ended: dict[int, RequestOutput] = {}
    while processor.request_ids:
        for output in processor.process(engine.step()):
            ended[int(output.request_id)] = output
        engine.cache_manager.check_integrity()
    return [ended[index] for index in range(len(prompts))]


def ids(output: RequestOutput) -> list[list[int]]:
    assert [one.index for one in output.outputs] == list(range(len(output.outputs)))
    return [one.token_ids for one in output.outputs]


@pytest.mark.parametrize("rule", RULES)
def test_completions_differ_and_a_seed_repeats_them(model: Qwen4ExpForCausalLM, rule: str) -> None:
    engine = make_engine(model, 3)
    seeded = sampled(n=4, seed=11, rejection_sample_method=rule)
    (first,) = complete(engine, [PROMPT], [seeded])
    assert len({tuple(one) for one in ids(first)}) == 4
    # Among others, and later.
    again, _ = complete(engine, [PROMPT, OTHERS[0]], [seeded, sampled(n=3)])
    assert ids(again) == ids(first)
    (alone,) = complete(engine, [PROMPT], [sampled(seed=11, rejection_sample_method=rule)])
    assert ids(alone) == ids(first)[:1]
    (other,) = complete(engine, [PROMPT], [sampled(n=4, seed=12, rejection_sample_method=rule)])
    assert set(map(tuple, ids(other))).isdisjoint(map(tuple, ids(first)))


def test_completions_without_a_seed_differ(model: Qwen4ExpForCausalLM) -> None:
    engine = make_engine(model, 3)
    unseeded = sampled(n=4)
    first, second = complete(engine, [PROMPT] * 2, [unseeded] * 2)
    assert len({tuple(one) for one in ids(first) + ids(second)}) == 8


def test_completions_at_temperature_0_are_equal(model: Qwen4ExpForCausalLM) -> None:
    (output,) = complete(make_engine(model, 3), [PROMPT], [sampled(n=3, temperature=0)])
    one, *others = ids(output)
    assert others == [one] * 2


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_means_the_same_whoever_else_runs(model: Qwen4ExpForCausalLM, rule: str) -> None:
    params = sampled(seed=42, rejection_sample_method=rule)
    engine = make_engine(model, 3)
    (alone,) = complete(engine, [PROMPT], [params])
    many = [sampled(2, seed=seed, rejection_sample_method=rule) for seed in range(100)]
    complete(engine, (OTHERS * 15)[:100], many)
    (after,) = complete(engine, [PROMPT], [params])
    beside = [sampled(seed=seed, rejection_sample_method=rule) for seed in range(7)]
    (*_, among) = complete(engine, [*OTHERS, PROMPT], [*beside, params])
    assert ids(alone) == ids(after) == ids(among)
    (another,) = complete(engine, [PROMPT], [sampled(seed=43, rejection_sample_method=rule)])
    assert ids(another) != ids(alone)


def test_under_coupled_a_seed_means_the_same_for_every_k(model: Qwen4ExpForCausalLM) -> None:
    params = sampled(n=3, seed=42, rejection_sample_method="coupled")
    texts = [ids(*complete(make_engine(model, k), [PROMPT], [params])) for k in (0, 1, 3, 5)]
    assert texts == [texts[0]] * 4


def test_the_figures_of_all_requests_add_up_to_the_engines(model: Qwen4ExpForCausalLM) -> None:
    engine = make_engine(model, 3)
    params = [
        sampled(n=3, seed=1),
        sampled(5, temperature=0),
        sampled(n=2, num_speculative_tokens=1, rejection_sample_method="coupled"),
        sampled(num_speculative_tokens=0),
        SamplingParams(n=4, max_tokens=30),
    ]
    processor = OutputProcessor(engine)
    for index, (prompt, one) in enumerate(zip(OTHERS[:5], params, strict=True)):
        processor.add_request(str(index), EncodedPrompt(prompt), one)
    last: dict[str, RequestOutput] = {}
    while processor.request_ids:
        for output in processor.process(engine.step()):
            last[output.request_id] = output
        if "2" in processor.request_ids and engine.num_steps == 4:
            aborted = processor.abort_request("2")
            assert aborted is not None
            last["2"] = aborted
    total = SpecDecodeMetrics(3)
    for output in last.values():
        assert output.metrics is not None
        total.merge(output.metrics.spec_decode)
        emitted = sum(len(one.token_ids) for one in output.outputs)
        assert output.metrics.spec_decode.num_emitted_tokens == emitted
    assert len(last) == 5
    assert {one.finish_reason for one in last["2"].outputs} == {"abort"}
    assert total == engine.metrics
    assert total.num_accepted_tokens > 20
    assert engine.cache_manager.num_free_rows == engine.config.max_num_seqs
