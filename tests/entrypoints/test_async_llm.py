"""`AsyncLLM`: it streams what `LLM.generate` gives, to any number of tasks and event loops."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from outrider.entrypoints.output_processor import merge_outputs
from outrider.errors import ConfigError, EngineDeadError, RequestError

TEXTS = ["def f(x):", "import", "class A:\n    ", "x = [1, 2"]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def async_llm(model_dir: Path) -> Iterator[AsyncLLM]:
    """Every test leaves it running and without requests."""
    llm = AsyncLLM(model_dir, speculative_config=SPECULATIVE)
    yield llm
    llm.shutdown()


@pytest.fixture
def own_async_llm(model_dir: Path) -> Iterator[AsyncLLM]:
    """One that a test may break."""
    llm = AsyncLLM(model_dir, speculative_config=SPECULATIVE)
    yield llm
    llm.shutdown()


async def read(outputs: AsyncIterator[RequestOutput], kind: RequestOutputKind) -> RequestOutput:
    """The whole of a stream, put together."""
    whole: RequestOutput | None = None
    async for output in outputs:
        assert whole is None or not whole.finished
        whole = output if whole is None else merge_outputs(whole, output, kind)
    assert whole is not None
    assert whole.finished
    return whole


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.002)


def is_idle(llm: AsyncLLM) -> bool:
    engine = llm.llm_engine
    has_all_rows = engine.cache_manager.num_free_rows == engine.config.max_num_seqs
    return has_all_rows and not engine.has_unfinished_requests()


PARAMS = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 5},
    "choices": {"seed": 5, "n": 3, "rejection_sample_method": "coupled"},
}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_streams_are_what_generate_gives(
    llm: LLM, async_llm: AsyncLLM, params: dict[str, Any], kind: RequestOutputKind
) -> None:
    one = SamplingParams(max_tokens=12, output_kind=kind, **params)

    async def stream() -> list[RequestOutput]:
        streams = [async_llm.generate(text, one, str(i)) for i, text in enumerate(TEXTS)]
        return await asyncio.gather(*(read(outputs, kind) for outputs in streams))

    streamed, expected = asyncio.run(stream()), llm.generate(TEXTS, one)
    assert [output.outputs for output in streamed] == [output.outputs for output in expected]
    assert [output.prompt for output in streamed] == TEXTS
    assert [output.request_id for output in streamed] == ["0", "1", "2", "3"]
    assert is_idle(async_llm)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_log_probabilities_stream(llm: LLM, async_llm: AsyncLLM, kind: RequestOutputKind) -> None:
    params = SamplingParams(
        max_tokens=12, seed=5, n=2, logprobs=2, prompt_logprobs=1, output_kind=kind
    )
    streamed = asyncio.run(read(async_llm.generate(TEXTS[0], params, "a"), kind))
    (expected,) = llm.generate(TEXTS[0], params)
    pairs = zip(streamed.outputs, expected.outputs, strict=True)
    positions = [
        (streamed.prompt_logprobs, expected.prompt_logprobs),
        *((one.logprobs, other.logprobs) for one, other in pairs),
    ]
    for found, wanted in positions:
        assert found is not None
        assert wanted is not None
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            values = [{i: found.logprob for i, found in (p or {}).items()} for p in (one, other)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
    for one, other in zip(streamed.outputs, expected.outputs, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        assert len(one.logprobs or ()) == len(one.token_ids)


def test_outputs_come_step_by_step(async_llm: AsyncLLM) -> None:
    async def lengths() -> list[int]:
        outputs = async_llm.generate(TEXTS[0], SHORT, "a")
        return [len(output.outputs[0].token_ids) async for output in outputs]

    found = asyncio.run(lengths())
    assert len(found) > 3
    assert found == sorted(set(found))
    assert found[-1] == 16


def test_defaults_are_the_checkpoints(async_llm: AsyncLLM) -> None:
    assert async_llm.get_default_sampling_params() == SamplingParams()
    assert async_llm.get_tokenizer() is async_llm.llm_engine.tokenizer
    whole = asyncio.run(read(async_llm.generate(TEXTS[0], None, "a"), RequestOutputKind.CUMULATIVE))
    assert len(whole.outputs[0].token_ids) <= 16


def test_abort(async_llm: AsyncLLM) -> None:
    async def scenario() -> None:
        params = SamplingParams(n=2, temperature=0, max_tokens=200, ignore_eos=True)
        streams = {name: async_llm.generate(TEXTS[0], params, name) for name in "abc"}
        first = {name: await anext(stream) for name, stream in streams.items()}
        assert not any(output.finished for output in first.values())
        await async_llm.abort(["a", "b", "nobody"])
        for name in "ab":
            outputs = [output async for output in streams[name]]
            assert [one.finish_reason for one in outputs[-1].outputs] == ["abort"] * 2
            assert [output.finished for output in outputs].index(True) == len(outputs) - 1
        await async_llm.abort("c")
        # The blocks are free as soon as it returns.
        assert is_idle(async_llm)
        await streams["c"].aclose()
        await async_llm.abort("a")

    asyncio.run(scenario())


def test_a_cancelled_task_gives_its_blocks_back(async_llm: AsyncLLM) -> None:
    async def scenario() -> None:
        tasks = [
            asyncio.create_task(
                read(async_llm.generate(TEXTS[0], LONG, name), RequestOutputKind.CUMULATIVE)
            )
            for name in "ab"
        ]
        await until(lambda: len(async_llm.llm_engine.scheduler._running) == 2)
        steps = async_llm.llm_engine.num_steps
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: is_idle(async_llm))
        # Of the fifty and more that each would have taken.
        assert async_llm.llm_engine.num_steps < steps + 25

    asyncio.run(scenario())


def test_a_closed_stream_gives_its_blocks_back(async_llm: AsyncLLM) -> None:
    async def scenario() -> None:
        closed = async_llm.generate(TEXTS[0], LONG, "a")
        await anext(closed)
        await closed.aclose()
        async for _ in async_llm.generate(TEXTS[0], LONG, "b"):
            break
        gc.collect()
        await until(lambda: is_idle(async_llm))
        # Cancelled before its first step.
        early = asyncio.create_task(anext(async_llm.generate(TEXTS[0], LONG, "c")))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        # The id of a stream that has gone may be another's: leaving it late harms nobody.
        whole = await read(async_llm.generate(TEXTS[0], SHORT, "a"), RequestOutputKind.CUMULATIVE)
        assert len(whole.outputs[0].token_ids) == 16

    asyncio.run(scenario())


def test_a_request_id_in_use(async_llm: AsyncLLM) -> None:
    async def scenario() -> None:
        first = async_llm.generate(TEXTS[0], LONG, "a")
        await anext(first)
        with pytest.raises(RequestError, match=r"^request id 'a' is in use$"):
            await anext(async_llm.generate(TEXTS[1], LONG, "a"))
        # The first is not disturbed by that, and its id is free afterwards.
        assert not (await anext(first)).finished
        await async_llm.abort("a")
        last = await read(first, RequestOutputKind.CUMULATIVE)
        assert (last.prompt, last.outputs[0].finish_reason) == (TEXTS[0], "abort")
        await read(async_llm.generate(TEXTS[1], None, "a"), RequestOutputKind.CUMULATIVE)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("", None, "a"), "the prompt is empty"),
        (({"promt": "a"}, None, "a"), "unknown key 'promt' of a prompt"),
        (([5, 4096], None, "a"), "token id 4096 is out of range"),
        (("a", {"temperature": 0}, "a"), "sampling_params must be SamplingParams, got {'temp"),
        (("a", SamplingParams(num_speculative_tokens=4), "a"), "is more than the engine's 3"),
        (("a", None, 7), "request_id must be a text, got 7"),
    ],
)
def test_bad_requests(async_llm: AsyncLLM, arguments: Any, reason: str) -> None:
    async def scenario() -> None:
        await anext(async_llm.generate(*arguments))

    with pytest.raises(RequestError) as raised:
        asyncio.run(scenario())
    assert reason in str(raised.value)
    assert is_idle(async_llm)


@pytest.mark.parametrize("request_id", [7, ["a", ["b"]], [{}], b"a"])
def test_abort_of_what_is_no_id(async_llm: AsyncLLM, request_id: Any) -> None:
    """It is told to who asks, and the engine goes on for the others."""

    async def scenario() -> None:
        reading = read(async_llm.generate(TEXTS[0], SHORT, "a"), RequestOutputKind.CUMULATIVE)
        with pytest.raises((RequestError, TypeError)):
            await asyncio.wait_for(async_llm.abort(request_id), 10)
        assert len((await reading).outputs[0].token_ids) == 16

    asyncio.run(scenario())
    assert async_llm.is_running


def test_bad_options(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        AsyncLLM(model_dir, max_model_length=10)


def test_one_event_loop_after_the_other_and_several_at_once(async_llm: AsyncLLM) -> None:
    found: list[list[int]] = []

    def serve(name: str) -> None:
        async def scenario() -> None:
            whole = await read(
                async_llm.generate(TEXTS[0], SHORT, name), RequestOutputKind.CUMULATIVE
            )
            found.append(whole.outputs[0].token_ids)

        asyncio.run(scenario())

    serve("a")
    threads = [threading.Thread(target=serve, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert found == [found[0]] * 4


def test_an_event_loop_that_ends_leaves_nothing(async_llm: AsyncLLM) -> None:
    async def scenario() -> None:
        await anext(async_llm.generate(TEXTS[0], LONG, "a"))

    asyncio.run(scenario())
    loop = asyncio.new_event_loop()
    stream = async_llm.generate(TEXTS[0], LONG, "b")
    loop.run_until_complete(anext(stream))
    # Nobody closes the stream; what is put into it finds the loop closed.
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.run(until(lambda: is_idle(async_llm)))
    assert async_llm.is_running


def test_an_error_of_the_engine_fails_everybody(
    own_async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "^the engine stopped after an error: ZeroDivisionError: no such number$"

    async def scenario() -> None:
        streams = [own_async_llm.generate(TEXTS[0], LONG, name) for name in "abc"]
        for stream in streams:
            await anext(stream)
        monkeypatch.setattr(own_async_llm.llm_engine, "step", broken)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=message) as raised:
                await read(stream, RequestOutputKind.CUMULATIVE)
            assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert (own_async_llm.is_running, own_async_llm.errored) == (False, True)
        with pytest.raises(EngineDeadError, match=message):
            await anext(own_async_llm.generate(TEXTS[0], LONG, "d"))
        await own_async_llm.abort("a")

    def broken() -> None:
        raise ZeroDivisionError("no such\nnumber")

    asyncio.run(scenario())
    own_async_llm.shutdown()


def test_shutdown_ends_what_runs(own_async_llm: AsyncLLM) -> None:
    message = r"^the engine was shut down$"

    async def scenario() -> None:
        assert (own_async_llm.is_running, own_async_llm.errored) == (True, False)
        streams = [own_async_llm.generate(TEXTS[0], LONG, name) for name in "ab"]
        for stream in streams:
            await anext(stream)
        own_async_llm.shutdown()
        assert not own_async_llm._thread._thread.is_alive()
        for stream in streams:
            with pytest.raises(EngineDeadError, match=message):
                await read(stream, RequestOutputKind.CUMULATIVE)
        with pytest.raises(EngineDeadError, match=message):
            await anext(own_async_llm.generate(TEXTS[0], LONG, "c"))
        await own_async_llm.abort("a")

    asyncio.run(scenario())
    own_async_llm.shutdown()
    assert (own_async_llm.is_running, own_async_llm.errored) == (False, False)
    assert is_idle(own_async_llm)


def test_the_thread_ends_with_the_object(model_dir: Path) -> None:
    llm = AsyncLLM(model_dir)
    asyncio.run(read(llm.generate(TEXTS[0], None, "a"), RequestOutputKind.CUMULATIVE))
    thread, engine = llm._thread._thread, weakref.ref(llm.llm_engine)
    del llm
    gc.collect()
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None


PROGRAM = """
import asyncio, sys
from outrider import AsyncLLM, SamplingParams

llm = AsyncLLM(sys.argv[1])
loop = asyncio.new_event_loop()
params = SamplingParams(max_tokens=250, ignore_eos=True)
stream = llm.generate("a", params, "a")
print(len(loop.run_until_complete(anext(stream)).outputs[0].token_ids))
"""


def test_a_program_ends_without_shutdown(model_dir: Path) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model_dir)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 60
