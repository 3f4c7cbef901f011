"""The server behind a socket: how it starts, whom it notices leaving, and how it ends."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from outrider.config import ServerConfig
from outrider.entrypoints.async_llm import AsyncLLM
from outrider.entrypoints.server.run import bind, listen, model_name, serve
from outrider.errors import ConfigError
from tests.entrypoints.server.app_client import bundled_served_model
from tests.entrypoints.server.running_server import RunningServer, running_server
from tests.entrypoints.server.scripted_llm import HELLO, Part, ScriptedLLM

ENDLESS: list[Part | None] = [Part("a", [1]), None]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


@contextmanager
def scripted(
    script: list[Part | None], **options: int
) -> Iterator[tuple[ScriptedLLM, RunningServer]]:
    llm = ScriptedLLM(script)
    config = ServerConfig(port=0, **options)
    with running_server(llm, bundled_served_model(), config) as running:
        yield llm, running


def open_request(server: RunningServer, **body: object) -> socket.socket:
    """A connection on which a request was sent and nothing was read."""
    content = json.dumps({"prompt": "a", **body})
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(content)}\r\n\r\n{content}".encode()
    )
    return connection


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionError:
        return False
    return True


def read_all(connection: socket.socket) -> str:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_events_are_sent_when_they_come_and_not_at_the_end() -> None:
    with scripted(ENDLESS) as (llm, server), open_request(server, stream=True) as connection:
        text = ""
        while '"text":"a"' not in text:
            text += connection.recv(65536).decode()
        assert "text/event-stream" in text
        assert "[DONE]" not in text
        assert len(llm.open_ids) == 1
        connection.close()
        wait_until(lambda: not llm.open_ids)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_closed_connection_frees_the_blocks(
    is_streamed: bool, real_server: RunningServer, async_llm: AsyncLLM
) -> None:
    engine = async_llm.llm_engine
    connection = open_request(real_server, stream=is_streamed, n=3, max_tokens=120, ignore_eos=True)
    wait_until(lambda: engine.scheduler.num_running == 3)
    steps = engine.num_steps
    connection.close()
    pools = [table.pool for table in engine.cache_manager.block_tables.values()]
    wait_until(lambda: all(pool.num_free == pool.num_blocks - 1 for pool in pools))
    # It ended by the close, long before its 120 tokens.
    assert engine.num_steps - steps < 60
    wait_until(lambda: not engine.has_unfinished_requests())
    engine.cache_manager.check_integrity()


def test_the_end_waits_for_what_runs_and_refuses_what_is_new() -> None:
    with scripted([None, *HELLO], shutdown_timeout_s=15) as (llm, server):
        connection = open_request(server)
        wait_until(lambda: len(llm.open_ids) == 1)
        server.signal()
        wait_until(lambda: server.server._serving.is_draining)
        wait_until(lambda: not accepts_connections(server.port))
        assert server.thread.is_alive()
        llm.script[0] = HELLO[0]
        answer = read_all(connection)
        assert '"text":"HelHello!"' in answer
        server.thread.join(20)
        assert not server.thread.is_alive()
        assert not llm.aborted_ids


@pytest.mark.parametrize("is_streamed", [False, True])
def test_at_the_deadline_what_runs_is_aborted_and_told_so(is_streamed: bool) -> None:
    with scripted(ENDLESS, shutdown_timeout_s=0) as (llm, server):
        connection = open_request(server, stream=is_streamed)
        wait_until(lambda: len(llm.open_ids) == 1)
        start = time.monotonic()
        server.stop()
        assert time.monotonic() - start < 10
        answer = read_all(connection)
        assert "the server is shutting down" in answer
        assert answer.startswith("HTTP/1.1 200" if is_streamed else "HTTP/1.1 503")
        assert not llm.open_ids


def test_a_second_signal_does_not_wait_for_the_deadline() -> None:
    with scripted(ENDLESS, shutdown_timeout_s=600) as (llm, server):
        connection = open_request(server)
        wait_until(lambda: len(llm.open_ids) == 1)
        server.signal()
        wait_until(lambda: server.server._serving.is_draining)
        server.signal()
        assert "shutting down" in read_all(connection)


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with bind(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        config = ServerConfig(port=port)
        # Two that load at once find out when the second one is ready.
        with bind(config) as second:
            listen(listener, config)
            with pytest.raises(ConfigError, match=f"port {port}: .*in use"):
                listen(second, config)
        with pytest.raises(ConfigError, match=f"port {port}: .*in use"):
            bind(config)
    with pytest.raises(ConfigError, match="host nowhere"):
        bind(ServerConfig(host="nowhere.invalid", allow_unauthenticated=True))


def test_nobody_can_connect_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with bind(ServerConfig(port=0)) as free:
        port = free.getsockname()[1]
    seen: list[bool] = []

    def load(**_: object) -> None:
        seen.append(accepts_connections(port))
        raise ConfigError("as far as it goes")

    monkeypatch.setattr("outrider.entrypoints.server.run.AsyncLLM", load)
    with pytest.raises(ConfigError, match="as far as it goes"):
        serve(ServerConfig(port=port), {})
    assert seen == [False]


def test_the_answer_of_a_large_body_comes_although_it_is_not_read() -> None:
    with scripted(HELLO, max_body_size=1000) as (_, server):
        content = b'{"prompt": "' + b"a" * 100_000 + b'"}'
        headers = {"content-type": "application/json"}
        response = httpx2.post(
            f"{server.url}/v1/completions", content=content, headers=headers, timeout=20
        )
        assert response.status_code == 413
        assert httpx2.get(f"{server.url}/health", timeout=20).status_code == 200


def test_a_checkpoint_is_called_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine" / "below"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    names = [model_name(Path(given)) for given in (".", "..", "/", "/srv/flash/")]
    assert names == ["below", "mine", "outrider", "flash"]
    assert model_name(None) == "outrider"
