"""Drafts by prompt look-up: what is drafted, and that whatever is drafted no text changes."""

import gc
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.batch import SampledTokens, ScheduledBatch
from outrider.config import RejectionSampleMethod
from outrider.entrypoints.llm import LLM
from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.weights import save_checkpoint
from outrider.request import Request
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.ngram_proposer import NgramProposer, look_up, read_on
from outrider.stop_checker import StopChecker
from tests.models.tiny_checkpoint import random_model, tiny_config
from tests.spec_decode.joint_law import JointLaw, conditional_laws
from tests.spec_decode.table_engine import PROMPT, TableEngine, random_tables
from tests.text_checkpoint import copy_tokenizer
from tests.tiny_engine import (
    Job,
    decode,
    decode_alone,
    greedy,
    make_engine,
    random_prompts,
    tiny_model,
)

MAX_TOKENS = 40
LENGTHS = (1, 2, 3, 9, 16, 17, 25, 33)
PASSES = 1e-4  # false-alarm rate of a test of a law

model = cache(tiny_model)


def naive_drafts(text: Sequence[int], shortest: int, longest: int, length: int) -> list[int]:
    """The rule in words: the longest end first, where it stands last."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[len(text) - n :]:
                read = list(text)
                for i in range(length):
                    read.append(read[place + i])
                return read[len(text) :]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 8),
)
def test_agrees_with_the_rule(text: list[int], longest: int, fewer: int, length: int) -> None:
    shortest, token_ids = max(longest - fewer, 1), np.array(text)
    place = look_up(token_ids, shortest, longest)
    drafts = [] if place is None else read_on(token_ids, place, length).tolist()
    assert drafts == naive_drafts(text, shortest, longest, length)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2]),  # the longer end, though it stands further back
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # of two places the last
        ([7, 5, 6, 5, 6], [5, 6, 5]),
        ([7, 5, 5], [5, 5, 5]),
        ([1, 2, 3, 4], []),
        ([4], []),
    ],
)
def test_what_is_drafted(text: list[int], drafts: list[int]) -> None:
    place = look_up(np.array(text), 1, 3)
    assert ([] if place is None else read_on(np.array(text), place, 3).tolist()) == drafts


def request(name: str, token_ids: list[int], **params: Any) -> Request:
    given_params = SamplingParams(**params)
    room = given_params.max_tokens or 1
    stops = StopChecker(given_params, frozenset(), room, None)
    return Request(name, token_ids, len(token_ids), given_params, room, stops, seed=0)


def propose(
    proposer: NgramProposer, requests: Sequence[Request], new_ids: Sequence[Sequence[int]]
) -> list[list[int]]:
    """What each request is drafted, the padding checked and left off."""
    size = len(requests)
    batch = ScheduledBatch(requests, [], [bool(ids) for ids in new_ids], None)
    result = SampledTokens(
        [0] * size, new_ids, [False] * size, [0] * size, [0] * size, [None] * size
    )
    drafts = proposer.propose(batch, torch.empty(0), result)
    if drafts is None:
        return [[]] * size
    assert drafts.probs is None, "a look-up is one-hot"
    rows = []
    for row, number in zip(drafts.token_ids.tolist(), drafts.num_drafts, strict=True):
        assert all(token_id == -1 for token_id in row[number:])
        rows.append(row[:number])
    return rows


def proposer(k: int = 3, **options: Any) -> NgramProposer:
    lengths = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return NgramProposer(num_speculative_tokens=k, **{**lengths, **options})


def test_each_request_by_itself() -> None:
    """Who emits nothing in a step gets nothing, and nobody more than there is use for."""
    requests = [
        request("found", [1, 2, 3, 4]),
        request("in the middle of its prompt", [1, 1, 1, 1]),
        request("not found", [5, 6]),
        request("asks for one", [1, 2, 3, 4], num_speculative_tokens=1),
        request("asks for none", [1, 2, 3, 4], num_speculative_tokens=0),
        request("near its cap", [1, 2, 3, 4], max_tokens=4),
    ]
    drafts = propose(proposer(), requests, [[1, 2], [], [7], [1, 2], [1, 2], [1, 2]])
    assert drafts == [[3, 4, 1], [], [], [3], [], [3]]
    limited = propose(proposer(max_model_len=7), requests[:1], [[1, 2]])
    assert limited == [[3]]
    assert propose(proposer(max_model_len=6), requests[:1], [[1, 2]]) == [[]]


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), st.booleans()), max_size=20))
def test_a_text_that_grows(steps: list[tuple[list[int], bool]]) -> None:
    """Emitted by steps, some of them without drafts, beside another request."""
    drafter = proposer(4, prompt_lookup_max=3)
    requests = [request("0", [0, 1, 2] * 3, max_tokens=1000), request("1", [3], max_tokens=1000)]
    for new_ids, is_both in steps:
        members = requests if is_both else requests[:1]
        drafts = propose(drafter, members, [new_ids] * len(members))
        for member, row in zip(members, drafts, strict=True):
            text = [*member.token_ids, *new_ids]
            assert row == (naive_drafts(text, 1, 3, 4) if new_ids else [])
            member.token_ids += new_ids


def test_a_long_prompt_is_held_no_longer_than_its_request() -> None:
    drafter = proposer()
    texts = drafter._texts
    for number in range(3):
        one = request("the same id", [number] * 1000)
        assert propose(drafter, [one], [[number]]) == [[number] * 3]
        assert len(texts) == 1
        del one
        gc.collect()
        assert not texts


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    """Its tokens were proposed from, and then the request did not take them up."""
    drafter = proposer()
    one = request("one", [5, 6, 7, 5])
    propose(drafter, [one], [[9]])
    assert propose(drafter, [one], [[6]]) == [naive_drafts([5, 6, 7, 5, 6], 1, 3, 3)]


# Prompts that repeat themselves, and the model's own cycles, give drafts that are right.
@cache
def prompts() -> list[list[int]]:
    some = random_prompts(LENGTHS)
    return [prompt * 3 if i % 2 else prompt for i, prompt in enumerate(some)]


def params(i: int, temperature: float, **options: Any) -> SamplingParams:
    if temperature == 0:
        return greedy(MAX_TOKENS - 4 * (i % 3), **options)
    return SamplingParams(
        temperature=temperature,
        seed=i,
        max_tokens=MAX_TOKENS - 4 * (i % 3),
        ignore_eos=True,
        rejection_sample_method="coupled",
        **options,
    )


@cache
def references(temperature: float) -> list[list[int]]:
    jobs = [Job(prompt, params(i, temperature)) for i, prompt in enumerate(prompts())]
    return [decode_alone(model(), job).token_ids for job in jobs]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_texts_are_those_of_plain_decoding(k: int, temperature: float) -> None:
    """In a batch that requests join, with numbers of drafts of their own, cut into pieces."""
    engine = make_engine(
        model(), k, method="ngram", prompt_lookup_min=1, prompt_lookup_max=3, max_num_seqs=5
    )
    jobs = [
        Job(
            prompt,
            params(i, temperature, num_speculative_tokens=None if i % 4 else k // 2),
            arrival=3 * i,
        )
        for i, prompt in enumerate(prompts())
    ]
    results = decode(engine, jobs)
    for result, expected in zip(results, references(temperature), strict=True):
        assert result.token_ids == expected
        assert result.finish_reason == "length"
    metrics = engine.metrics
    assert metrics.num_accepted_tokens > 0
    assert metrics.num_draft_tokens > metrics.num_accepted_tokens, "nothing is ever rejected"


def test_a_text_that_repeats_itself_is_drafted_right() -> None:
    """The model is made to say one token for ever; all but the first drafts are kept."""
    drafter = make_engine(model(), 3, method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    with torch.no_grad():
        weight = drafter.model.lm_head.weight.clone()
        drafter.model.lm_head.weight.zero_()
        try:
            (result,) = decode(drafter, [Job([5, 6, 7], greedy(41))])
        finally:
            drafter.model.lm_head.weight.copy_(weight)
    assert result.token_ids == [0] * 41
    assert result.windows[0] == (0, 0, 1)
    assert result.windows[2:] == [(3, 3, 4)] * 9 + [(2, 2, 3)]


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
def test_the_law_of_the_text(rule: RejectionSampleMethod) -> None:
    """Of texts of eight tokens, each from its own seed, against an enumeration of all of them."""
    tables = random_tables(3, agreement=0.7, spread=0.8, is_sparse=False)
    sampling = SamplingParams(temperature=1, max_tokens=8)
    engine = TableEngine(tables, rule, 3)
    engine.proposer = proposer()
    context = PROMPT[0] * tables.vocab_size + PROMPT[1]
    law = JointLaw.of_tables(conditional_laws(tables.target, sampling), context, 8)
    assert law.p_value(engine.sample_texts(sampling, 6_000)) > PASSES
    assert engine.scheduler.metrics.num_accepted_tokens > 3_000


def test_a_checkpoint_without_a_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny_config(vocab_size=4096, max_position_embeddings=256, mtp_num_hidden_layers=0)
    target = random_model(config)
    torch.nn.init.zeros_(target.lm_head.weight[1:])  # one of two ids is said, now and then again
    save_checkpoint(target, config, tmp_path, torch.float32)
    copy_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no mtp.\* tensors"):
        LLM(tmp_path, speculative_config={"method": "mtp"})
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    llm = LLM(tmp_path, speculative_config=ngram)
    assert llm.llm_engine.model.mtp is None
    prompt = {"prompt_token_ids": [40, 41, 42] * 4}
    some = greedy(24)
    drafted = llm.generate(prompt, some)[0].outputs[0]
    plain = LLM(tmp_path).generate(prompt, some)[0].outputs[0]
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
    assert llm.llm_engine.metrics.num_draft_tokens > 0


def test_the_cache_has_no_room_for_a_head() -> None:
    """A head that does not draft has no blocks, and no state."""
    assert model().mtp is not None
    groups = make_engine(model(), 3, method="ngram").cache_manager.groups
    assert groups.keys() == make_engine(model()).cache_manager.groups.keys()
    assert groups.keys() < make_engine(model(), 3).cache_manager.groups.keys()
