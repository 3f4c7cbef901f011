"""The law of what the engine's own loop emits under each parameter, against the exact law.

A case is a parameter and a rule: five tokens of one request per seed at K = 3, all parameters in
one batch, over tables that depend on the last two tokens. A first token of its own is followed by a
window of three drafts, so that four of the five tokens are judged inside a window, where the
history holds drafts. The exact law is enumerated text by text in plain Python.

The chi-square test (`JointLaw.p_value`: the joint law of the five tokens, and that of each three)
passes above 1e-6: one choice of seeds in a million would fail a right engine, in each case. Fewer
texts must fail, below 1e-9, where the target looks at the parameters in the first row of a
window only, or leaves the drafts out of the history.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from outrider.config import RejectionSampleMethod
from outrider.sampling import RowProcessors, SamplingTensors
from outrider.sampling.logits_processors_naive import process_logits_naive
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.sampled_windows import SampledWindows
from tests.sampling.test_compute_probs import compute_probs_naive
from tests.spec_decode.joint_law import JointLaw
from tests.spec_decode.table_engine import PROMPT, TableEngine, make_request, random_tables

PASSES, FAILS = 1e-6, 1e-9
RULES: list[RejectionSampleMethod] = ["standard", "block", "coupled"]
K, NUM_TOKENS, VOCAB_SIZE = 3, 5, 4
NUM_TEXTS = 2000
TABLES = random_tables(7, agreement=0.6, spread=0.6, is_sparse=False, vocab_size=VOCAB_SIZE)


@dataclass(frozen=True)
class Case:
    """What a request asks for.

    Attributes:
        params: one parameter that matters, or several.
        bad_words: sequences of ids.
        looks_back: the parameter looks at the output so far.
    """

    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    looks_back: bool = False


CASES = {
    "temperature": Case(SamplingParams(temperature=0.4)),
    "top_k": Case(SamplingParams(top_k=2)),
    "top_p": Case(SamplingParams(top_p=0.6)),
    "min_p": Case(SamplingParams(min_p=0.4)),
    "logit_bias": Case(SamplingParams(logit_bias={1: 1.5, 2: -100})),
    "repetition_penalty": Case(SamplingParams(repetition_penalty=6), looks_back=True),
    "frequency_penalty": Case(SamplingParams(frequency_penalty=1.5), looks_back=True),
    "presence_penalty": Case(SamplingParams(presence_penalty=-2), looks_back=True),
    "bad_words": Case(SamplingParams(), ((3, 2), (1, 1), (2, 0, 1)), looks_back=True),
    "bad_word": Case(SamplingParams(), ((3,),)),
    "min_tokens": Case(SamplingParams(min_tokens=3, stop_token_ids=[2]), looks_back=True),
    "all": Case(
        SamplingParams(
            temperature=0.8,
            top_k=3,
            top_p=0.95,
            min_p=0.05,
            logit_bias={0: -0.5},
            repetition_penalty=1.5,
            frequency_penalty=0.7,
            presence_penalty=-0.5,
            min_tokens=2,
            stop_token_ids=[2],
        ),
        ((3, 1), (0, 1, 3)),
        looks_back=True,
    ),
}


@cache
def exact_law(name: str) -> JointLaw:
    """All texts of NUM_TOKENS with their probabilities; a stop token repeats to the end."""
    texts = list(_texts(CASES[name], []))
    codes = [_code(text) for text, _ in texts]
    assert codes == sorted(codes)
    probs = torch.tensor([prob for _, prob in texts], dtype=torch.float64)
    return JointLaw(torch.tensor(codes), probs, VOCAB_SIZE, NUM_TOKENS)


def _texts(case: Case, output: list[int]) -> Iterator[tuple[list[int], float]]:
    if len(output) == NUM_TOKENS:
        yield output, 1.0
        return
    for token_id, prob in enumerate(_next_law(case, output)):
        if prob > 0:
            for text, rest in _texts(case, [*output, token_id]):
                yield text, prob * rest


def _next_law(case: Case, output: list[int]) -> list[float]:
    params, stops = case.params, case.params.stop_token_ids or ()
    if len(output) > params.min_tokens and output[-1] in stops:
        return [float(token_id == output[-1]) for token_id in range(VOCAB_SIZE)]
    context = [*PROMPT, *output][-2:]
    logits = TABLES.target[context[0] * VOCAB_SIZE + context[1]].double().tolist()
    scores = process_logits_naive(logits, params, PROMPT, output, stops, case.bad_words)
    return compute_probs_naive(scores, params.temperature, params.top_k, params.top_p, params.min_p)


def _code(text: list[int]) -> int:
    code = 0
    for token_id in text:
        code = code * VOCAB_SIZE + token_id
    return code


def p_values(rule: RejectionSampleMethod, names: list[str], num_texts: int) -> dict[str, float]:
    """Of `num_texts` texts of each case, whose requests share batches and join as others leave."""
    requests = [
        make_request(
            seed,
            replace(CASES[name].params, max_tokens=NUM_TOKENS),
            bad_words=CASES[name].bad_words,
            choice=choice,
        )
        for seed in range(num_texts)
        for choice, name in enumerate(names)
    ]
    engine = TableEngine(TABLES, rule, K, max_num_seqs=8000)
    texts = [[*text, *text[-1:] * NUM_TOKENS][:NUM_TOKENS] for text in engine.texts(requests)]
    assert 0.2 < engine.scheduler.metrics.acceptance_rate < 0.95
    return {
        name: exact_law(name).p_value(torch.tensor(texts[choice :: len(names)]))
        for choice, name in enumerate(names)
    }


@pytest.mark.parametrize("rule", RULES)
def test_each_parameter_has_the_exact_law(rule: RejectionSampleMethod) -> None:
    for name, p_value in p_values(rule, list(CASES), NUM_TEXTS).items():
        assert p_value > PASSES, name


tensors_of_rows = SamplingTensors.rows
processors_of_windows = SampledWindows.processors


def parameters_of_first_rows(params: SamplingTensors, index: Tensor) -> SamplingTensors:
    """Where several rows of one request follow each other, those past the first ask for nothing."""
    rows = tensors_of_rows(params, index)
    is_later = index == torch.nn.functional.pad(index[:-1], (1, 0), value=-1)
    return replace(
        rows,
        temperature=rows.temperature.masked_fill(is_later, 1),
        top_k=rows.top_k.masked_fill(is_later, 0),
        top_p=rows.top_p.masked_fill(is_later, 1),
        min_p=rows.min_p.masked_fill(is_later, 0),
    )


def processors_of_first_rows(windows: SampledWindows) -> RowProcessors | None:
    row_processors, is_first = processors_of_windows(windows), windows.rows[:, 0]
    if row_processors is None:
        return None
    rows = row_processors.rows
    index = row_processors.index
    if index is None:
        index = torch.arange(len(rows.place))
    keep = torch.isin(index, is_first)
    first = replace(rows, place=rows.place[keep], depth=rows.depth[keep])
    return replace(row_processors, index=index[keep], rows=first)


def processors_without_drafts(windows: SampledWindows) -> RowProcessors | None:
    row_processors = processors_of_windows(windows)
    if row_processors is None:
        return None
    rows = row_processors.rows
    return replace(row_processors, rows=replace(rows, depth=torch.zeros_like(rows.depth)))


Mutant = tuple[type, str, Callable[..., object]]
FIRST_ROWS: list[Mutant] = [
    (SamplingTensors, "rows", parameters_of_first_rows),
    (SampledWindows, "processors", processors_of_first_rows),
]
WITHOUT_DRAFTS: list[Mutant] = [(SampledWindows, "processors", processors_without_drafts)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("mutants", "names", "num_texts"),
    [
        (FIRST_ROWS, list(CASES), 1000),
        (WITHOUT_DRAFTS, [name for name, case in CASES.items() if case.looks_back], 1500),
    ],
    ids=["first_rows", "without_drafts"],
)
def test_mutation_fails(
    rule: RejectionSampleMethod,
    mutants: list[Mutant],
    names: list[str],
    num_texts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, name, mutant in mutants:
        monkeypatch.setattr(owner, name, mutant)
    for name, p_value in p_values(rule, names, num_texts).items():
        assert p_value < FAILS, name
