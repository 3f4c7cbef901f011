"""The thread in which an engine steps for tasks of event loops.

Nothing but this thread touches the engine once it runs: what others want is put into a queue and
carried out between two steps.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.entrypoints.output_processor import OutputProcessor
from outrider.errors import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.engine.engine import LLMEngine
    from outrider.entrypoints.output_stream import OutputStream
    from outrider.entrypoints.prompt_encoder import EncodedPrompt
    from outrider.outputs import RequestOutput
    from outrider.sampling_params import SamplingParams


@dataclass(frozen=True)
class _Add:
    """A request to run; its outputs go into `stream`."""

    stream: OutputStream
    prompt: EncodedPrompt
    params: SamplingParams
    arrival_time: float


@dataclass(frozen=True)
class _Abort:
    """Requests to abort; their streams end with a last output."""

    request_ids: Sequence[str]
    on_done: Callable[[], object]


@dataclass(frozen=True)
class _Leave:
    """The request of a stream that nobody reads any more."""

    stream: OutputStream


@dataclass(frozen=True)
class _Stop:
    """The end."""


_Command = _Add | _Abort | _Leave | _Stop


class EngineThread:
    """Steps an engine as long as there is something to do, and waits else.

    It is a daemon: a program that ends without `stop` does not wait for it.

    Args:
        engine: nobody else steps it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._processor = OutputProcessor(engine)
        self._streams: dict[str, OutputStream] = {}
        # SimpleQueue, since `stop` may be called by the garbage collector in the middle of a put.
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._end: str | None = None
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._end is None

    @property
    def cause(self) -> BaseException | None:
        """The error that ended it, if one did."""
        return self._cause

    def dead_error(self) -> EngineDeadError:
        """Why it runs no more; a new object for each call, since a raised one holds its frames."""
        error = EngineDeadError(self._end)
        error.__cause__ = self._cause
        return error

    def add(
        self, stream: OutputStream, prompt: EncodedPrompt, params: SamplingParams, arrival: float
    ) -> None:
        """Queues a request; what is wrong with it is raised where the stream is read."""
        self._put(_Add(stream, prompt, params, arrival))

    def abort(self, request_ids: Sequence[str], on_done: Callable[[], object]) -> None:
        """Ends requests; unknown ids are no error.

        Args:
            request_ids: of requests.
            on_done: called in any thread when their blocks are free.
        """
        self._put(_Abort(request_ids, on_done))

    def leave(self, stream: OutputStream) -> None:
        """Aborts the request of a stream that nobody reads any more, if it still runs."""
        self._put(_Leave(stream))

    def stop(self) -> None:
        """Ends after the step at hand, and waits for that; what runs fails."""
        self._put(_Stop())
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _put(self, command: _Command) -> None:
        self._commands.put(command)
        # The thread looks at the queue once more after it has set this, so nothing stays there.
        if self._end is not None:
            self._refuse_commands()

    def _run(self) -> None:
        try:
            while self._take_commands():
                for output in self._processor.process(self._engine.step()):
                    self._deliver(output)
            end = "the engine was shut down"
        except BaseException as error:
            self._cause = error
            end = f"the engine stopped after an error: {type(error).__name__}: {error}"
        self._end = " ".join(end.split())
        for stream in self._streams.values():
            stream.fail(self.dead_error())
        self._streams.clear()
        self._refuse_commands()

    def _take_commands(self) -> bool:
        """Carries out what is wanted, and waits for it while nothing runs; False is the end."""
        while True:
            try:
                command = self._commands.get(block=not self._processor.has_unfinished_requests)
            except queue.Empty:
                return True
            match command:
                case _Add():
                    self._add(command)
                case _Abort(request_ids, on_done):
                    for request_id in request_ids:
                        self._abort(request_id)
                    on_done()
                case _Leave(stream):
                    # The id may be another's by now.
                    if self._streams.get(stream.request_id) is stream:
                        self._abort(stream.request_id)
                case _Stop():
                    for request_id in self._processor.request_ids:
                        self._processor.abort_request(request_id)
                    return False

    def _add(self, command: _Add) -> None:
        stream = command.stream
        try:
            self._processor.add_request(
                stream.request_id, command.prompt, command.params, command.arrival_time
            )
        except Exception as error:
            stream.fail(error)
        else:
            self._streams[stream.request_id] = stream

    def _abort(self, request_id: str) -> None:
        output = self._processor.abort_request(request_id)
        if output is not None:
            self._streams.pop(request_id).put(output)

    def _deliver(self, output: RequestOutput) -> None:
        is_read = self._streams[output.request_id].put(output)
        if output.finished:
            del self._streams[output.request_id]
        elif not is_read:
            self._abort(output.request_id)

    def _refuse_commands(self) -> None:
        """Answers what can no longer be carried out; for any thread after the end."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Add):
                command.stream.fail(self.dead_error())
            elif isinstance(command, _Abort):
                command.on_done()
