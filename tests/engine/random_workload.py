"""Requests of every kind that come and go, and the engine that runs them with too little memory."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.engine.engine import LLMEngine
from outrider.sampling_params import SamplingParams
from tests.piece_tokenizer import piece_tokenizer
from tests.tiny_engine import VOCAB_SIZE

MAX_K = 4
# One letter a token, so that stop strings and bad words are found now and then.
TOKENIZER = piece_tokenizer([bytes([65 + i]) for i in range(VOCAB_SIZE)], eos_token_ids=[2])


@dataclass(frozen=True)
class Visit:
    """One request of a workload.

    Attributes:
        prompt: ids.
        params: what is asked for.
        arrival: the step before which it is added.
        leaves_after: steps after which it is aborted, if it has not ended by then.
        leaves_in_step: whether that happens in the middle of the step.
    """

    prompt: list[int]
    params: SamplingParams
    arrival: int
    leaves_after: int | None
    leaves_in_step: bool

    @property
    def is_reproducible(self) -> bool:
        """Whether its text depends on nothing but itself."""
        return self.params.is_greedy or self.params.rejection_sample_method == "coupled"


class Failure(Exception):
    """A step fails."""


@dataclass
class Said:
    """What came out of a request."""

    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def random_visits(num_visits: int, seed: int) -> list[Visit]:
    """A quarter with nothing but a temperature, the others with one or four parameters more."""
    rng = random.Random(seed)
    visits, now = [], 0
    for index in range(num_visits):
        now += rng.choice([0, 0, 0, 0, 1, 3])
        leaves = rng.random() < 0.15
        visits.append(
            Visit(
                prompt=[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 5, 12, 25]))],
                params=_random_params(rng, index),
                arrival=now,
                leaves_after=rng.randrange(1, 20) if leaves else None,
                leaves_in_step=rng.random() < 0.5,
            )
        )
    return visits


def _random_params(rng: random.Random, index: int) -> SamplingParams:
    max_tokens = rng.choice([1, 2, 6, 12, 24])
    options: dict[str, Any] = {
        "temperature": rng.choice([0, 0, 0.4, 0.8, 1.2]),
        "seed": index,
        "max_tokens": max_tokens,
        "num_speculative_tokens": rng.choice([None, *range(MAX_K + 1)]),
        "rejection_sample_method": rng.choice(["coupled"] * 8 + ["block", "standard"]),
        "ignore_eos": rng.random() < 0.5,
    }
    extra: dict[str, Any] = {
        "top_k": rng.choice([1, 3, 20]),
        "top_p": rng.choice([0.3, 0.9]),
        "min_p": 0.1,
        "presence_penalty": rng.choice([-1.0, 1.0]),
        "frequency_penalty": rng.choice([-0.5, 1.5]),
        "repetition_penalty": rng.choice([0.8, 1.4]),
        "logit_bias": {rng.randrange(VOCAB_SIZE): 3.0, rng.randrange(VOCAB_SIZE): -100.0},
        "min_tokens": rng.randint(1, max_tokens),
        "stop_token_ids": rng.sample(range(VOCAB_SIZE), 8),
        "stop": [_letters(rng, 1), _letters(rng, 2)],
        "bad_words": [_letters(rng, 1), _letters(rng, 2)],
        "include_stop_str_in_output": True,
        "logprobs": 2,
    }
    names = rng.sample(sorted(extra), rng.choice([0, 1, 1, 4]))
    return SamplingParams(**options, **{name: extra[name] for name in names})


def _letters(rng: random.Random, count: int) -> str:
    return "".join(chr(65 + rng.randrange(VOCAB_SIZE)) for _ in range(count))


class Workload:
    """Runs visits to their ends, and looks at every table after every step.

    Args:
        engine: without requests.
        visits: request i has the id str(i).
        disturbance: probability that, before a step, the request that came last gives way as if
            blocks had run out. A quarter as often a step fails, after it was judged which drafts
            stay.
    """

    def __init__(
        self, engine: LLMEngine, visits: Sequence[Visit], disturbance: float = 0.0
    ) -> None:
        self.engine = engine
        self._disturbance = disturbance
        self._rng = random.Random(len(visits))
        self.visits = visits
        self.said = [Said([], "") for _ in visits]
        self.left: set[int] = set()
        self._leaving: dict[int, int] = {}
        self._in_step: list[int] = []
        verdict = engine.rejection_sampler

        def interrupted(*args: Any) -> Any:
            result = verdict(*args)
            while self._in_step:
                self._leave(self._in_step.pop())
            if self._happens(self._disturbance / 4):
                raise Failure
            return result

        engine.rejection_sampler = interrupted  # type: ignore[assignment]

    def run(self) -> None:
        coming = sorted(range(len(self.visits)), key=lambda i: self.visits[i].arrival)
        now = 0
        while coming or self.engine.has_unfinished_requests():
            while coming and self.visits[coming[0]].arrival <= now:
                self._add(coming.pop(0), now)
            for i in [i for i, last in self._leaving.items() if last <= now]:
                if str(i) in self.engine.scheduler and self.visits[i].leaves_in_step:
                    self._in_step.append(i)
                else:
                    self._leave(i)
            if self.engine.scheduler._running and self._happens(self._disturbance):
                self.engine.scheduler._preempt_last()
            try:
                outputs = self.engine.step()
            except Failure:
                outputs = []
            for output in outputs:
                self._hear(output)
            check(self.engine)
            now += 1

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _add(self, i: int, now: int) -> None:
        visit = self.visits[i]
        self.engine.add_request(str(i), visit.prompt, visit.params)
        if visit.leaves_after is not None:
            self._leaving[i] = now + visit.leaves_after

    def _leave(self, i: int) -> None:
        """Aborts a request, or does nothing to one that has ended."""
        self._leaving.pop(i, None)
        if self.said[i].finish_reason is None:
            self.left.add(i)
        self.engine.abort_request(str(i))

    def _hear(self, output: Any) -> None:
        i = int(output.request_id)
        said = self.said[i]
        assert i not in self.left, "it was aborted"
        assert said.finish_reason is None, "it has ended"
        said.token_ids += output.new_token_ids
        said.text += output.new_text
        said.finish_reason, said.stop_reason = output.finish_reason, output.stop_reason
        if self.visits[i].params.logprobs is not None:
            assert len(output.logprobs) == len(output.new_token_ids)


def check(engine: LLMEngine) -> None:
    """Nothing is leaked, held twice or forgotten, between two steps."""
    engine.cache_manager.check_integrity()
    scheduler = engine.scheduler
    queue = [*scheduler._running, *scheduler._waiting]
    ids = [request.request_id for request in queue]
    assert [int(one) for one in ids] == sorted(int(one) for one in ids), "order of arrival"
    assert ids == [one for one in scheduler._requests if one in ids]
    assert len(ids) == len(scheduler._requests)
    rows = [request.row for request in scheduler._running]
    assert (
        len(set(rows))
        == len(rows)
        == engine.config.max_num_seqs - (engine.cache_manager.num_free_rows)
    )
    for request in scheduler._waiting:
        assert (request.row, request.num_computed_tokens, request.num_drafts) == (None, 0, 0)
    for request in scheduler._running:
        assert request.num_computed_tokens < len(request.token_ids)
        assert not request.num_drafts or scheduler._drafts is not None
