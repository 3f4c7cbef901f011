"""A server on a port of its own, in a thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx2

from outrider.config import ServerConfig
from outrider.entrypoints.server.app import Api, ServedModel
from outrider.entrypoints.server.engine_client import AsyncLLMClient
from outrider.entrypoints.server.run import Server, bind, listen, served_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outrider.entrypoints.async_llm import AsyncLLM
    from outrider.entrypoints.server.engine_client import EngineClient


@dataclass
class RunningServer:
    """A server that listens.

    Attributes:
        url: where it does.
        server: that runs.
        thread: in which it runs.
        loop: in which it runs.
    """

    url: str
    server: Server
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def signal(self) -> None:
        """What a signal does, in the thread of the event loop, as the handler of a signal runs."""
        # A loop that is closed has ended already.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.server._on_signal)

    def stop(self) -> None:
        """Ends it as a signal does, and waits for that."""
        self.signal()
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server did not end"


@contextmanager
def running_server(
    llm: EngineClient, model: ServedModel, config: ServerConfig | None = None
) -> Iterator[RunningServer]:
    """Runs a server; at the end it has ended."""
    config = (config or ServerConfig(port=0)).with_model_name("tiny")
    with bind(config) as listener:
        listen(listener, config)
        server = Server(Api(llm, model, config), config)
        started: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()

        async def work() -> None:
            started.put(asyncio.get_running_loop())
            await server.serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = RunningServer(url, server, thread, started.get(timeout=20))
        try:
            yield running
        finally:
            running.stop()


@contextmanager
def served_to(llm: AsyncLLM, checkpoint: Path) -> Iterator[tuple[RunningServer, httpx2.Client]]:
    """A server over an engine, and a client of it; at the end the engine is shut down too."""
    try:
        with (
            running_server(AsyncLLMClient(llm), served_model(llm, checkpoint)) as running,
            httpx2.Client(base_url=running.url, timeout=60) as http,
        ):
            yield running, http
    finally:
        llm.shutdown()
