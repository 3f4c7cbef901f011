"""The joint law of what the engine's own loop emits, for every rule and K, against the exact law.

A case is a rule and K: 2K + 2 consecutive tokens of one request per seed, in batches of thousands,
by the real step over tables (`table_engine.py`). The tables depend on the last two tokens; logits
of -inf and the parameters exclude ids, not the same ones from target and head. The chi-square test
(`JointLaw.p_value`) passes above 1e-6: one choice of seeds in a million would fail a right engine,
in each case. In every case a million texts show a temperature of the target that is off by 3 %
(`test_power`), and the mutations below show in 20,000.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.config import RejectionSampleMethod
from outrider.sampling import (
    Purpose,
    RowProcessors,
    SamplingTensors,
    compute_probs,
    sample_from_probs,
    uniforms,
)
from outrider.sampling_params import SamplingParams
from outrider.spec_decode import verify_rules
from outrider.spec_decode.verify_rules import VerifyResult
from outrider.spec_decode.verify_window import VerifyWindow
from tests.spec_decode.joint_law import JointLaw, conditional_laws
from tests.spec_decode.table_engine import (
    PROMPT,
    TableEngine,
    Tables,
    make_request,
    random_tables,
)

PASSES, FAILS = 1e-6, 1e-12
RULES: list[RejectionSampleMethod] = ["standard", "block", "coupled"]
MAX_K = 8
ALL_CASES = [(rule, k) for rule in RULES for k in range(1, MAX_K + 1)]
QUICK_CASES = [(rule, k) for rule in RULES for k in (1, 3)] + [("block", 2), ("block", 4)]
MIN_NUM_TOKENS = 8


DENSE = random_tables(3, agreement=0.7, spread=0.7, is_sparse=False)
SPARSE = random_tables(3, agreement=0.7, spread=0.7, is_sparse=True)
# After each pair of tokens each of these leaves one or two ids to the target.
PROFILES = [
    (SPARSE, SamplingParams(temperature=1)),
    (DENSE, SamplingParams(temperature=0.7, top_k=2, top_p=0.95)),
    (SPARSE, SamplingParams(temperature=2, min_p=0.4)),
]
# Drafts that are mostly wrong, in many ways: what an error does to the law is large.
TOY = random_tables(4, agreement=0, spread=2, is_sparse=False)


def profile(
    rule: RejectionSampleMethod, num_speculative_tokens: int
) -> tuple[Tables, SamplingParams]:
    """Tables and parameters of a case: each rule meets each profile at several K."""
    index = (RULES.index(rule) + num_speculative_tokens) % len(PROFILES)
    tables, params = PROFILES[index]
    # Never too few for a first token and two full windows at small K.
    num_tokens = max(2 * num_speculative_tokens + 2, MIN_NUM_TOKENS)
    return tables, replace(params, max_tokens=num_tokens)


def exact_law(tables: Tables, params: SamplingParams) -> JointLaw:
    assert params.max_tokens is not None, "a law is of so many tokens"
    return JointLaw.of_tables(
        conditional_laws(tables.target, params),
        PROMPT[0] * tables.vocab_size + PROMPT[1],
        params.max_tokens,
        *params.stop_token_ids,
    )


def case_p_value(rule: RejectionSampleMethod, num_speculative_tokens: int, num_texts: int) -> float:
    tables, params = profile(rule, num_speculative_tokens)
    engine = TableEngine(tables, rule, num_speculative_tokens)
    texts = engine.sample_texts(params, num_texts)
    metrics = engine.scheduler.metrics
    assert 0.1 < metrics.acceptance_rate < 0.9, "some drafts are kept, some are not"
    return exact_law(tables, params).p_value(texts)


@pytest.mark.parametrize(("rule", "num_speculative_tokens"), QUICK_CASES)
def test_joint_law(rule: RejectionSampleMethod, num_speculative_tokens: int) -> None:
    assert case_p_value(rule, num_speculative_tokens, num_texts=60_000) > PASSES


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "num_speculative_tokens"), ALL_CASES)
def test_joint_law_in_full(rule: RejectionSampleMethod, num_speculative_tokens: int) -> None:
    assert case_p_value(rule, num_speculative_tokens, num_texts=1_000_000) > PASSES


@pytest.mark.parametrize(("rule", "num_speculative_tokens"), ALL_CASES)
def test_power(rule: RejectionSampleMethod, num_speculative_tokens: int) -> None:
    """What the full test sees with near certainty."""
    tables, params = profile(rule, num_speculative_tokens)
    warmer = replace(params, temperature=params.temperature * 1.03)
    law, other = exact_law(tables, params), exact_law(tables, warmer)
    assert law.power(other, 1_000_000, PASSES) > 0.999


def test_crowd() -> None:
    """Requests of all rules, K from 0 to 3 and two sets of parameters, that cross one another.

    They end at a stop token or at the cap, and others take their places.
    """
    num_texts = 30_000
    params = [
        SamplingParams(temperature=0.7, stop_token_ids=[2], max_tokens=8),
        SamplingParams(temperature=2, min_p=0.4, top_k=2, max_tokens=8),
    ]
    requests = [
        make_request(
            seed,
            replace(
                params[seed % 2],
                rejection_sample_method=RULES[seed % 3],
                num_speculative_tokens=seed // 6 % 4,
            ),
        )
        for seed in range(num_texts)
    ]
    engine = TableEngine(DENSE, "block", 3, max_num_seqs=2000)
    texts = [(text + [2] * 8)[:8] for text in engine.texts(requests)]
    for index in range(6):
        law = exact_law(DENSE, params[index % 2])
        assert law.p_value(torch.tensor(texts[index::6])) > PASSES


@pytest.mark.parametrize("rule", RULES)
def test_one_hot_drafts(rule: RejectionSampleMethod) -> None:
    params = SamplingParams(temperature=1, max_tokens=8)
    engine = TableEngine(DENSE, rule, 3, draft_sample_method="greedy")
    assert exact_law(DENSE, params).p_value(engine.sample_texts(params, 30_000)) > PASSES


def toy_p_value(rule: RejectionSampleMethod) -> float:
    """Of 20,000 texts at K = 2, of two to five windows each."""
    params = SamplingParams(temperature=1, max_tokens=6)
    return exact_law(TOY, params).p_value(TableEngine(TOY, rule, 2).sample_texts(params, 20_000))


@pytest.mark.parametrize("rule", RULES)
def test_toy(rule: RejectionSampleMethod) -> None:
    """The mutations below start from an engine that passes."""
    assert toy_p_value(rule) > PASSES


def uniforms_of_the_token_position(
    seeds: Tensor, choice: Tensor, position: Tensor, depth: Tensor, purpose: Purpose
) -> Tensor:
    return uniforms(seeds, choice, position + depth, torch.zeros_like(depth), purpose)


def uniforms_used_twice(
    seeds: Tensor, choice: Tensor, position: Tensor, depth: Tensor, purpose: Purpose
) -> Tensor:
    once = Purpose.ACCEPT if purpose == Purpose.RESAMPLE else purpose
    return uniforms(seeds, choice, position, depth, once)


def probs_at_another_temperature(
    logits: Tensor, params: SamplingTensors, processors: RowProcessors | None
) -> Tensor:
    return compute_probs(logits, replace(params, temperature=params.temperature * 1.1), processors)


def draw_at_another_temperature(probs: Tensor, uniforms: Tensor) -> Tensor:
    return sample_from_probs(probs.sqrt(), uniforms)


emit = verify_rules._emit


def emit_from_the_residual_of_a_token(
    window: VerifyWindow, num_kept: Tensor, prefix_ratios: Tensor | None, uniforms: Tensor
) -> VerifyResult:
    return emit(window, num_kept, None, uniforms)


def emit_from_the_target(
    window: VerifyWindow, num_kept: Tensor, prefix_ratios: Tensor | None, uniforms: Tensor
) -> VerifyResult:
    return emit(replace(window, num_valid=num_kept), num_kept, prefix_ratios, uniforms)


REJECTION_SAMPLER = "outrider.spec_decode.rejection_sampler"
DRAFT_SAMPLER = "outrider.spec_decode.draft_sampler"
VERIFY_RULES = "outrider.spec_decode.verify_rules"


@pytest.mark.parametrize(
    ("rule", "names", "mutant"),
    [
        (
            "block",
            [f"{REJECTION_SAMPLER}.uniforms", f"{DRAFT_SAMPLER}.uniforms"],
            uniforms_of_the_token_position,
        ),
        ("block", [f"{REJECTION_SAMPLER}.uniforms"], uniforms_used_twice),
        ("standard", [f"{REJECTION_SAMPLER}.uniforms"], uniforms_used_twice),
        ("block", [f"{REJECTION_SAMPLER}.compute_probs"], probs_at_another_temperature),
        ("standard", [f"{REJECTION_SAMPLER}.compute_probs"], probs_at_another_temperature),
        ("coupled", [f"{REJECTION_SAMPLER}.compute_probs"], probs_at_another_temperature),
        ("block", [f"{DRAFT_SAMPLER}.sample_from_probs"], draw_at_another_temperature),
        ("standard", [f"{DRAFT_SAMPLER}.sample_from_probs"], draw_at_another_temperature),
        ("block", [f"{VERIFY_RULES}._emit"], emit_from_the_residual_of_a_token),
        ("block", [f"{VERIFY_RULES}._emit"], emit_from_the_target),
        ("standard", [f"{VERIFY_RULES}._emit"], emit_from_the_target),
    ],
)
def test_mutation_fails(
    rule: RejectionSampleMethod,
    names: list[str],
    mutant: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in names:
        monkeypatch.setattr(name, mutant)
    assert toy_p_value(rule) < FAILS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(temperature=0.5, max_tokens=8),
        SamplingParams(temperature=2, max_tokens=8, min_p=0.1, presence_penalty=1.5),
        SamplingParams(temperature=1, max_tokens=8, top_k=2, top_p=0.9, logit_bias={1: 2.0}),
    ],
)
def test_a_head_that_is_the_target_loses_no_draft(
    params: SamplingParams, rule: RejectionSampleMethod
) -> None:
    """The laws of drafts and target are made in one way, whatever is asked for."""
    engine = TableEngine(replace(DENSE, draft=DENSE.target), rule, 3)
    engine.sample_texts(params, 200)
    metrics = engine.scheduler.metrics
    assert metrics.num_drafts >= 200
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens
