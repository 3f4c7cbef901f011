"""The engine's thread and the streams out of it, step by step: who is slow, who leaves."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.entrypoints.engine_thread import EngineThread
from outrider.entrypoints.output_stream import OutputStream
from outrider.entrypoints.prompt_encoder import EncodedPrompt
from outrider.errors import EngineDeadError
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.sampling_params import RequestOutputKind, SamplingParams
from outrider.tokenizer import Tokenizer
from tests.entrypoints.scripted_engine import ScriptedEngine, emit

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPT = EncodedPrompt([5, 6], "text")
NUM_STEPS = 13


class SteppedEngine(ScriptedEngine):
    """One that waits within each step until the test allows it."""

    def __init__(self, tokenizer: Tokenizer, steps: list[Any]) -> None:
        super().__init__(tokenizer, steps)
        self.num_begun = 0
        self._allowed = threading.Semaphore(0)

    def step(self) -> Any:
        self.num_begun += 1
        self._allowed.acquire()
        return super().step()

    def allow(self, num_steps: int = 1000) -> None:
        self._allowed.release(num_steps)

    def wait_for_step(self, number: int) -> None:
        """Returns when so many have begun; what those before emitted is in the streams then."""
        deadline = time.monotonic() + 60
        while self.num_begun < number:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> SteppedEngine:
    """Two completions that get a token a step."""
    steps = [[emit(0, [40 + i]), emit(1, [60 + i])] for i in range(NUM_STEPS - 1)]
    return SteppedEngine(tokenizer, [*steps, [emit(0, [99], "length"), emit(1, [98], "length")]])


@pytest.fixture
def thread(engine: SteppedEngine) -> Iterator[EngineThread]:
    thread = EngineThread(engine)  # type: ignore[arg-type]
    yield thread
    engine.allow()
    thread.stop()


def add(
    thread: EngineThread,
    kind: RequestOutputKind = CUMULATIVE,
    name: str = "a",
    loop: asyncio.AbstractEventLoop | None = None,
) -> OutputStream:
    stream = OutputStream(name, kind, loop or asyncio.get_running_loop())
    thread.add(stream, PROMPT, SamplingParams(n=2, output_kind=kind), 0.0)
    return stream


def ids(output: RequestOutput) -> list[list[int]]:
    return [one.token_ids for one in output.outputs]


@pytest.mark.parametrize("pace", [1, 2, 3, NUM_STEPS - 1])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_a_slow_reader_reads_all_and_nothing_twice(
    engine: SteppedEngine, thread: EngineThread, kind: RequestOutputKind, pace: int
) -> None:
    async def scenario() -> list[RequestOutput]:
        stream, outputs = add(thread, kind), []
        for done in range(pace, NUM_STEPS, pace):
            engine.allow(pace)
            engine.wait_for_step(done + 1)
            outputs.append(await stream.take())
        engine.allow(1)
        return [*outputs, await stream.take()]

    outputs = asyncio.run(scenario())
    first, second = [*range(40, 52), 99], [*range(60, 72), 98]
    ends = [*range(pace, NUM_STEPS, pace), NUM_STEPS]
    begins = [0, *ends[:-1]] if kind == DELTA else [0] * len(ends)
    assert [ids(output) for output in outputs] == [
        [first[begin:end], second[begin:end]] for begin, end in zip(begins, ends, strict=True)
    ]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_final_only_is_one_output(engine: SteppedEngine, thread: EngineThread) -> None:
    async def scenario() -> RequestOutput:
        engine.allow()
        return await add(thread, FINAL_ONLY).take()

    output = asyncio.run(scenario())
    assert output.finished
    assert [len(one) for one in ids(output)] == [NUM_STEPS] * 2


def test_the_event_loop_goes_on_during_a_step(engine: SteppedEngine, thread: EngineThread) -> None:
    async def scenario() -> None:
        stream = add(thread)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.take(), 0.05)
        assert engine.num_begun == 1
        # It was cancelled while it waited, and has lost nothing by that.
        engine.allow(1)
        assert ids(await stream.take()) == [[40], [60]]

    asyncio.run(scenario())


def test_a_reader_is_woken_once_for_all_that_waits() -> None:
    calls: list[Callable[[], object]] = []
    loop: Any = SimpleNamespace(call_soon_threadsafe=calls.append, is_closed=lambda: False)
    stream = OutputStream("a", DELTA, loop)
    for token_id in range(1000):
        assert stream.put(RequestOutput("a", None, [5], [CompletionOutput(0, "x", [token_id])]))
    assert len(calls) == 1
    output = asyncio.run(stream.take())
    assert output.outputs == [CompletionOutput(0, "x" * 1000, list(range(1000)))]


def test_a_stream_that_is_left_is_aborted_and_no_other(
    engine: SteppedEngine, thread: EngineThread
) -> None:
    async def scenario() -> None:
        first = add(thread)
        engine.wait_for_step(1)
        thread.leave(first)
        thread.leave(first)
        # Its id is free, and who has it now is not aborted by the next.
        second = add(thread)
        thread.leave(first)
        engine.allow(1)
        engine.wait_for_step(2)
        assert engine.aborted == engine.added[:2]
        duplicate = add(thread)
        thread.leave(duplicate)
        engine.steps[0] = []
        engine.allow(1)
        with pytest.raises(ValueError, match="in use"):
            await duplicate.take()
        engine.wait_for_step(3)
        assert engine.aborted == engine.added[:2]
        thread.leave(second)
        engine.allow(1)

    # Steps of requests that are gone would be nobody's.
    engine.steps[0] = []
    asyncio.run(scenario())


@pytest.mark.parametrize("has_output_waiting", [False, True])
def test_a_closed_event_loop_ends_its_requests(
    engine: SteppedEngine, thread: EngineThread, has_output_waiting: bool
) -> None:
    loop = asyncio.new_event_loop()
    add(thread, loop=loop)
    if has_output_waiting:
        engine.allow(1)
        engine.wait_for_step(2)
    loop.close()
    assert engine.aborted == []
    engine.allow(1)
    deadline = time.monotonic() + 60
    while engine.aborted != engine.added or not engine.added:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert thread.is_running


def test_what_is_asked_of_an_ended_thread_is_answered(
    engine: SteppedEngine, thread: EngineThread
) -> None:
    async def scenario() -> None:
        engine.allow()
        thread.stop()
        with pytest.raises(EngineDeadError, match=r"^the engine was shut down$"):
            await asyncio.wait_for(add(thread).take(), 60)
        is_done = threading.Event()
        thread.abort(["a"], is_done.set)
        assert is_done.is_set()
        thread.stop()

    asyncio.run(scenario())


def test_what_waits_is_read_before_the_error(engine: SteppedEngine, thread: EngineThread) -> None:
    engine.steps[1] = MemoryError("too much")

    async def scenario() -> None:
        stream, waiting = add(thread), add(thread, name="b")
        engine.steps[0] = engine.steps[0][:2]
        engine.allow(2)
        with pytest.raises(EngineDeadError, match="MemoryError: too much"):
            await waiting.take()
        assert ids(await stream.take()) == [[40], [60]]
        with pytest.raises(EngineDeadError, match="MemoryError: too much"):
            await stream.take()
        assert isinstance(thread.cause, MemoryError)

    asyncio.run(scenario())
