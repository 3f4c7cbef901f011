"""HTTP/1.1 connections that nobody can hold for nothing: each part of a request has a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.entrypoints.server import request_body

if TYPE_CHECKING:
    import asyncio

HEAD_TIMEOUT_S = 30.0
# For a client to read some of what waits for it.
READ_TIMEOUT_S = 60.0
# For the answer to a body that did not come in time, and its way to the client.
GRACE_S = 5.0


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which itself bounds nothing but the time between two requests.

    A head must be whole in time, counted from the connection or from its first byte, and so must
    a body, whether it is read or not: one that is refused by its head is not. An answer of which
    nothing is read for long, the buffers full, ends with its connection: the request would keep its
    place in the queue for as long as the client likes.
    """

    # What their side is to send, and when the connection ends if they have not.
    _awaited: type[h11.IDLE] | type[h11.SEND_BODY] | None = None
    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A client has sent something."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """A request has been answered."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        super().connection_lost(exc)
        self._await(None, 0)
        self._stop_waiting_for_reader()

    def pause_writing(self) -> None:
        """The buffers are full."""
        super().pause_writing()
        self._stop_waiting_for_reader()
        self._reading = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read some of it."""
        super().resume_writing()
        self._stop_waiting_for_reader()

    def _stop_waiting_for_reader(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _watch(self) -> None:
        """Sets the deadline of what is awaited now."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._await(h11.SEND_BODY, request_body.BODY_TIMEOUT_S + GRACE_S)
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._await(h11.IDLE, HEAD_TIMEOUT_S)
        else:
            self._await(None, 0)

    def _await(
        self, awaited: type[h11.IDLE] | type[h11.SEND_BODY] | None, timeout_s: float
    ) -> None:
        if awaited is self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited, self._deadline = awaited, None
        if awaited is not None:
            # What they do not read is not waited for either.
            self._deadline = self.loop.call_later(timeout_s, self.transport.abort)
