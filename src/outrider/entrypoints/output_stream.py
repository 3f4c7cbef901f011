"""Outputs of one request on their way from the engine's thread to the task that waits for them."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from outrider.entrypoints.output_processor import merge_outputs

if TYPE_CHECKING:
    from outrider.outputs import RequestOutput
    from outrider.sampling_params import RequestOutputKind


class OutputStream:
    """One request's outputs, of which those that wait are merged into one.

    So a task that is slower than the engine loses nothing, reads nothing twice, and holds up
    nobody; what waits for it is never more than the whole output.

    Args:
        request_id: of the request.
        output_kind: of the request.
        loop: of the task that takes the outputs.
    """

    def __init__(
        self, request_id: str, output_kind: RequestOutputKind, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.request_id = request_id
        self._output_kind = output_kind
        self._loop = loop
        self._lock = threading.Lock()
        self._is_ready = asyncio.Event()
        self._waiting: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> bool:
        """Adds an output; for any thread.

        Returns:
            Whether somebody can still take it: False where the event loop is closed.
        """
        with self._lock:
            before = self._waiting
            if before is None:
                self._waiting = output
            else:
                self._waiting = merge_outputs(before, output, self._output_kind)
        # The task has been woken for what waited before.
        return self._wake() if before is None else not self._loop.is_closed()

    def fail(self, error: Exception) -> None:
        """Ends the stream: once what waits is taken, `take` raises; for any thread."""
        with self._lock:
            self._error = error
        self._wake()

    async def take(self) -> RequestOutput:
        """What has come out since the last call; waits for it. One task alone may call this."""
        while True:
            with self._lock:
                output, self._waiting = self._waiting, None
                error = self._error
            if output is not None:
                return output
            if error is not None:
                raise error
            await self._is_ready.wait()
            # Cleared before the look at what waits: an output that comes in between wakes again.
            self._is_ready.clear()

    def _wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._is_ready.set)
        except RuntimeError:
            # The loop is closed, and its tasks with it.
            return False
        return True
