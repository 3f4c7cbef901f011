"""Requests of every kind at once, of which many are given up: nothing is wrong, nothing is left."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outrider.entrypoints.async_llm import AsyncLLM
from outrider.entrypoints.llm import LLM
from outrider.entrypoints.output_stream import OutputStream
from outrider.entrypoints.self_test import (
    MAX_NEAR_TIES_PER_TOKEN,
    NEAR_TIE_MARGIN,
    first_difference,
)
from outrider.entrypoints.server.serving import Generation
from outrider.grammar.grammar_path import GrammarPath
from outrider.grammar.xgrammar_matcher import XGrammarMatcher
from outrider.request import Request
from outrider.structured_outputs import StructuredOutputsParams
from tests.entrypoints.server.metric_figures import figures
from tests.entrypoints.server.running_server import RunningServer, served_to
from tests.entrypoints.server.soak_client import COUNTED, PER_POSITION, Answer, Choice, ask_all
from tests.entrypoints.server.soak_visits import MAX_K, Visit, VisitMaker
from tests.held_memory import STATM, Held, count_objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import httpx2

    from outrider.outputs import CompletionOutput
    from outrider.sampling_params import SamplingParams

SPECULATIVE = {"method": "mtp", "num_speculative_tokens": MAX_K}
MAX_MODEL_LEN = 256
# Room for fewer requests than run at once, so that some give way.
NUM_BLOCKS, MAX_NUM_SEQS = 36, 12
# What a request holds while it is there, and nobody after it.
OF_REQUESTS = (Request, GrammarPath, XGrammarMatcher, OutputStream, Generation)
KINDS = ("compared", "drawn", "refused", "left before the first byte", "left in mid-stream")


@dataclass
class Soaked:
    """A server under load, and what is looked at while nobody is there.

    Attributes:
        llm: its engine.
        running: its server.
        http: a client of it.
    """

    llm: AsyncLLM
    running: RunningServer
    http: httpx2.Client

    def figures(self) -> dict[str, float]:
        """The counters of /metrics."""
        return figures(self.http.get("/metrics").text)

    def added_since(self, before: dict[str, float]) -> dict[str, float]:
        """By how much the counters have grown."""
        return {name: value - before[name] for name, value in self.figures().items()}

    def wait_until_idle(self, max_num_files: int | None = None) -> int:
        """Those that left have to be gone within some steps, and their connections closed.

        Args:
            max_num_files: that may be open then; None is any number.

        Returns:
            How many are open.
        """
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found, num_files = self.figures(), len(list(Path("/proc/self/fd").iterdir()))
            states = [found[f"vllm:num_requests_{name}"] for name in ("running", "waiting")]
            is_idle = not any(states) and not self.running.server._serving._num_unfinished
            if is_idle and num_files <= (max_num_files or num_files):
                return num_files
            time.sleep(0.02)
        raise AssertionError("requests, or connections, are left that nobody waits for")

    def check_caches(self) -> None:
        """All is free but what is kept for others, and with that let go everything is."""
        manager = self.llm.llm_engine.cache_manager
        manager.check_integrity()
        assert manager.num_free_rows == MAX_NUM_SEQS
        assert not any(pool.holders for pool in manager.state_pools.values())
        pools = [table.pool for table in manager.block_tables.values()]
        assert [pool.num_free for pool in pools] == [NUM_BLOCKS] * len(pools)
        assert manager.prefix is not None
        for pool in pools:
            assert len(pool.unused) + len(pool.remembered) == NUM_BLOCKS
        self.llm.llm_engine.reset_prefix_cache()
        manager.check_integrity()
        assert [len(pool.unused) for pool in pools] == [NUM_BLOCKS] * len(pools)
        assert not manager.prefix.snapshots.num_published

    @property
    def child_pids(self) -> list[int]:
        """Processes that this one has started and that still run."""
        tasks = Path("/proc/self/task").glob("*/children")
        return sorted(int(pid) for task in tasks for pid in task.read_text().split())


@contextmanager
def soaked(checkpoint: Path) -> Iterator[Soaked]:
    """A server with too little memory and short steps."""
    options = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "block_size": 8}
    plan = LLM(checkpoint, speculative_config=SPECULATIVE, **options).llm_engine.cache_plan
    llm = AsyncLLM(
        checkpoint,
        speculative_config=SPECULATIVE,
        kv_cache_memory=NUM_BLOCKS * plan.bytes_per_block,
        max_num_batched_tokens=96,
        **options,
    )
    with served_to(llm, checkpoint) as (running, http):
        yield Soaked(llm, running, http)


@dataclass
class SoloRuns:
    """Runs requests one after the other, plainly, in an engine that keeps nothing of them.

    Attributes:
        llm: K = 0, without a prefix cache.
        near_ties: where a text went another way at a choice that hung on the last bits.
        num_tokens: compared.
    """

    llm: LLM
    near_ties: list[str] = field(default_factory=list)
    num_tokens: int = 0

    @classmethod
    def of(cls, checkpoint: Path) -> SoloRuns:
        options = {"max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False}
        return cls(LLM(checkpoint, max_num_seqs=1, **options))

    def check(self, visit: Visit, answer: Answer) -> None:
        """A request has said what it says alone, or the beginning of that where it was given up."""
        if answer.has_left and not answer.choices:
            return
        params = self._params(visit)
        assert answer.has_left or len(answer.choices) == visit.num_choices
        for number, prompt in enumerate(visit.prompts):
            run = self.llm.chat if visit.is_chat else self.llm.generate
            (alone,) = run(_as_prompt(prompt), params)
            for expected in alone.outputs:
                got = answer.choices[number * params.n + expected.index]
                if answer.has_left and got.finish_reason is None:
                    expected = _beginning(expected, got)
                self._compare(alone.prompt_token_ids, params, expected, got)

    def _params(self, visit: Visit) -> SamplingParams:
        fields = {**visit.fields, "num_speculative_tokens": 0}
        if visit.wanted is not None:
            fields["structured_outputs"] = StructuredOutputsParams(**visit.wanted)
        return replace(self.llm.get_default_sampling_params(), **fields)

    def _compare(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        expected: CompletionOutput,
        got: Choice,
    ) -> None:
        place = first_difference(list(expected.token_ids), list(got.token_ids))
        self.num_tokens += len(expected.token_ids)
        if place is None:
            said = (expected.text, expected.finish_reason, expected.stop_reason)
            assert (got.text, got.finish_reason, got.stop_reason) == said
            return
        ids = [*prompt_ids, *expected.token_ids[:place]]
        margin = float(self.llm.llm_engine.margins(ids, len(prompt_ids), params).min())
        told = f"{params}: {got} is not {expected} from token {place} on, margin {margin:.2g}"
        assert margin < NEAR_TIE_MARGIN, told
        self.near_ties.append(told)


def _as_prompt(prompt: object) -> object:
    is_ids = isinstance(prompt, list) and isinstance(prompt[0], int)
    return {"prompt_token_ids": prompt} if is_ids else prompt


def _beginning(expected: CompletionOutput, got: Choice) -> CompletionOutput:
    """As much of an output as somebody has read who left; of its text some may be held back."""
    return replace(
        expected,
        token_ids=expected.token_ids[: len(got.token_ids)],
        text=got.text if expected.text.startswith(got.text) else expected.text,
        finish_reason=None,
        stop_reason=None,
    )


def soak(
    checkpoint: Path, num_requests: int, num_at_once: int, num_after: int, max_growth_mib: int
) -> list[str]:
    """Loads a server, and looks for what is wrong or left.

    Args:
        checkpoint: served.
        num_requests: of which a third is given up.
        num_at_once: of them.
        num_after: further requests, of which none is given up.
        max_growth_mib: of the resident memory after the first fifth of the requests.

    Returns:
        What is to be read of it, in lines.
    """
    maker = VisitMaker(seed=num_requests, vocab_size=4096, leaving_share=0.35)
    visits = maker.visits(num_requests)
    fifth = num_requests // 5
    alive_before = count_objects(*OF_REQUESTS)
    with soaked(checkpoint) as server:
        url = server.running.url
        # Starts the process that compiles, before files and processes are counted.
        ask_all(url, [Visit("a", False, {"max_tokens": 2}, {}, {"choice": ["yes"]})], 1)
        start, counters = time.monotonic(), server.figures()
        answers = ask_all(url, visits[:fifth], num_at_once)
        num_files, pids = server.wait_until_idle(), server.child_pids
        before = Held.measure()
        answers += ask_all(url, visits[fifth:], num_at_once)
        server.wait_until_idle(num_files)
        after = Held.measure()
        seconds = time.monotonic() - start
        assert server.child_pids == pids
        alive = count_objects(*OF_REQUESTS)
        # The engine's thread names the last one for as long as it waits for another.
        assert alive.pop("OutputStream") <= alive_before.pop("OutputStream") + 1
        assert alive == alive_before
        assert after.num_tensors <= before.num_tensors
        assert after.resident_mib <= before.resident_mib + max_growth_mib
        check_sums_of_all(visits, answers, server.added_since(counters))
        num_preemptions = server.llm.llm_engine.scheduler.num_preemptions
        check_sums(server, maker, num_after, num_at_once)
        server.check_caches()
    solo = SoloRuns.of(checkpoint)
    start_of_solo = time.monotonic()
    kinds = check_answers(visits, answers, solo)
    assert num_preemptions >= num_requests // 500
    return [
        f"{num_requests} requests, {num_at_once} at once, in {seconds:.0f} s; alone "
        f"{time.monotonic() - start_of_solo:.0f} s",
        ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))),
        f"{solo.num_tokens} tokens compared, {len(solo.near_ties)} near-ties, "
        f"{num_preemptions} times a request gave way",
        f"after a fifth {before}, at the end {after}",
        *solo.near_ties,
    ]


def check_answers(visits: Sequence[Visit], answers: Sequence[Answer], solo: SoloRuns) -> list[str]:
    """All that came is right; returns its kinds, of which none is missing."""
    kinds, faults = [], []
    for visit, answer in zip(visits, answers, strict=True):
        try:
            kinds.append(check_answer(visit, answer, solo))
        except Exception as fault:
            faults.append(f"{visit}: {fault}")
    assert not faults, "\n".join([f"{len(faults)} of {len(visits)} are wrong:", *faults[:20]])
    assert {*kinds} == {*KINDS}
    assert len(solo.near_ties) <= max(1, solo.num_tokens * MAX_NEAR_TIES_PER_TOKEN)
    return kinds


def check_answer(visit: Visit, answer: Answer, solo: SoloRuns) -> str:
    """What came of one request is right; returns its kind."""
    if answer.has_left:
        if visit.is_reproducible:
            solo.check(visit, answer)
        return "left in mid-stream" if answer.choices else "left before the first byte"
    if visit.wrong_field is not None:
        assert (answer.status, answer.wrong_field) == (400, visit.wrong_field), visit
        return "refused"
    assert answer.status == 200, (visit, answer)
    for choice in answer.choices.values():
        if choice.finish_reason == "stop" and choice.stop_reason is None:
            visit.check_text(choice.text)
    if not visit.is_reproducible:
        return "drawn"
    solo.check(visit, answer)
    return "compared"


def check_sums_of_all(
    visits: Sequence[Visit], answers: Sequence[Answer], added: dict[str, float]
) -> None:
    """The counters hold all that was told, and no more than those that left can have added."""
    pairs = list(zip(visits, answers, strict=True))
    ended = [(v, a) for v, a in pairs if a.status == 200 and not a.has_left]
    told = _drafting([answer for _, answer in ended])
    assert told["vllm:spec_decode_num_accepted_tokens_total"]
    assert all(value <= added[name] for name, value in told.items())
    total = sum(value for name, value in added.items() if name.startswith("vllm:request_success_t"))
    num_ended = sum(visit.num_choices for visit, _ in ended)
    num_left = sum(visit.num_choices for visit, answer in pairs if answer.has_left)
    assert num_ended <= total <= num_ended + num_left


def check_sums(server: Soaked, maker: VisitMaker, num_requests: int, num_at_once: int) -> None:
    """Where nobody leaves, the counters add what the answers tell, to the last token."""
    visits = [replace(one, leaving=None) for one in maker.visits(num_requests)]
    before = server.figures()
    answers = ask_all(server.running.url, visits, num_at_once)
    server.wait_until_idle()
    added = server.added_since(before)
    ended = [answer for answer in answers if answer.status == 200]
    choices = [choice for answer in ended for choice in answer.choices.values()]
    for name, told in _drafting(ended).items():
        assert added[name] == told
    assert added["vllm:prompt_tokens_total"] == sum(one.num_prompt_tokens for one in ended)
    assert added["vllm:generation_tokens_total"] == sum(one.num_completion_tokens for one in ended)
    assert added["vllm:generation_tokens_total"] == sum(len(one.token_ids) for one in choices)
    for reason in ("stop", "length", "abort", "error"):
        told = sum(choice.finish_reason == reason for choice in choices)
        assert added[f"vllm:request_success_total:{reason}"] == told


def _drafting(answers: Sequence[Answer]) -> dict[str, int]:
    """What answers tell of drafting, added up under the names of the counters."""
    names = [f"{name}_total" for name in COUNTED]
    names += [f"{PER_POSITION}_total:{place}" for place in range(MAX_K)]
    sums = map(sum, zip(*(answer.drafting for answer in answers), strict=True))
    told = dict(zip(names, sums, strict=True))
    return {f"vllm:spec_decode_{name}": value for name, value in told.items()}


@pytest.mark.skipif(not STATM.exists(), reason="reads /proc")
# After so few requests as a fifth of 60, memory still comes to what the program as such takes.
@pytest.mark.parametrize(
    "sizes", [(60, 12, 15, 24), pytest.param((3000, 32, 100, 16), marks=pytest.mark.slow)]
)
def test_soak(
    guessing_dir: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int, int]
) -> None:
    # So few that the cache is soon full, and grammars come and go.
    monkeypatch.setattr("outrider.grammar.compiler._MAX_CACHED", 8)
    for line in soak(guessing_dir, *sizes):
        print(line)  # noqa: T201 - shown by -s
