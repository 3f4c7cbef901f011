"""Clients that connect and send nothing, or next to nothing, while others are served."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx2
import pytest

from outrider.config import ServerConfig
from outrider.entrypoints.server import connection, request_body
from tests.entrypoints.server.app_client import bundled_served_model
from tests.entrypoints.server.running_server import RunningServer, running_server
from tests.entrypoints.server.scripted_llm import HELLO, Part, ScriptedLLM

TIMEOUT_S = 0.7
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
BODY = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n"
JSON = b"content-type: application/json\r\n\r\n"


@pytest.fixture
def script() -> list[Part | None]:
    return list(HELLO)


@pytest.fixture
def grace_s() -> float:
    return TIMEOUT_S


@pytest.fixture
def llm(script: list[Part | None]) -> ScriptedLLM:
    return ScriptedLLM(script)


@pytest.fixture
def server(
    monkeypatch: pytest.MonkeyPatch, llm: ScriptedLLM, grace_s: float
) -> Iterator[RunningServer]:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(connection, "GRACE_S", grace_s)
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", TIMEOUT_S)
    with running_server(llm, bundled_served_model(), ServerConfig(port=0)) as one:
        yield one


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_answer(client: socket.socket) -> bytes:
    """An answer, which is an object of JSON behind its headers, while the connection stays."""
    received = b""
    while not received.endswith(b"}"):
        part = client.recv(65536)
        assert part, f"the connection was closed after {received!r}"
        received += part
    return received


def read_until_closed(client: socket.socket) -> bytes:
    """What comes until the other side closes; a timeout is an error."""
    received = b""
    with suppress(ConnectionError):
        while part := client.recv(65536):
            received += part
    return received


def dribble(client: socket.socket, byte: bytes) -> bytes:
    """Sends a byte now and then until the connection is closed, and returns what came."""
    received, end = b"", time.monotonic() + 20
    client.settimeout(0.02)
    while time.monotonic() < end:
        try:
            client.sendall(byte)
            part = client.recv(65536)
        except TimeoutError:
            continue
        except ConnectionError:
            return received
        if not part:
            return received
        received += part
    pytest.fail("the connection was not closed")


def is_well(server: RunningServer) -> bool:
    return httpx2.get(f"{server.url}/health", timeout=20).status_code == 200


def test_who_says_nothing_is_left(server: RunningServer) -> None:
    silent = [connect(server) for _ in range(50)]
    assert is_well(server)
    start = time.monotonic()
    for client in silent:
        assert read_until_closed(client) == b""
        client.close()
    assert time.monotonic() - start < 10
    assert is_well(server)


@pytest.mark.parametrize("sent", [b"", b"GET", HEALTH, HEALTH + b"x: "])
def test_a_head_that_dribbles_is_given_up(server: RunningServer, sent: bytes) -> None:
    with connect(server) as client:
        client.sendall(sent)
        assert dribble(client, b"a") == b""
    assert is_well(server)


def test_a_later_head_that_dribbles_is_given_up(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(HEALTH + b"\r\n")
        assert read_answer(client).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET")
        assert dribble(client, b"a") == b""


@pytest.mark.parametrize("script", [[Part("x" * 4_000_000, [97]) for _ in range(8)]])
def test_who_reads_nothing_of_an_answer_is_left(
    server: RunningServer, llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its request would keep its place for as long as the client likes."""
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", TIMEOUT_S)
    body = b'{"prompt": "a", "stream": true}'
    with connect(server) as client:
        client.sendall(BODY.replace(b"100000", str(len(body)).encode()) + JSON + body)
        assert client.recv(64).startswith(b"HTTP/1.1 200")
        end = time.monotonic() + 20
        while llm.open_ids and time.monotonic() < end:
            time.sleep(0.05)
        assert not llm.open_ids
        assert len(read_until_closed(client)) < 8 * 4_000_000
    assert is_well(server)


# Time for the answer, however busy the machine is.
@pytest.mark.parametrize("grace_s", [4.0])
def test_a_body_that_dribbles_is_told_so(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(BODY + JSON)
        answer = dribble(client, b" ")
    assert answer.startswith(b"HTTP/1.1 408")
    assert (
        "the body did not come" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    )


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (BODY.replace(b"localhost", b"evil.example") + JSON, b"403"),
        (BODY + b"\r\n", b"415"),
        (BODY.replace(b"completions", b"nothing") + JSON, b"404"),
        (HEALTH + b"content-length: 100000\r\n\r\n", b"200"),
    ],
    ids=["403", "415", "404", "200"],
)
def test_a_body_that_nobody_reads_is_not_awaited_for_ever(
    server: RunningServer, head: bytes, status: bytes
) -> None:
    with connect(server) as client:
        client.sendall(head)
        assert dribble(client, b" ").startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("script", [[None, *HELLO]])
def test_no_deadline_ends_what_was_asked_in_time(
    server: RunningServer, script: list[Part | None]
) -> None:
    body = b'{"prompt": "a"}'
    head = BODY.replace(b"100000", str(len(body)).encode()) + JSON
    with connect(server) as client:
        client.sendall(head + body)
        # Longer than all of the deadlines.
        time.sleep(4 * TIMEOUT_S)
        script[0] = HELLO[0]
        assert b'"text":"HelHello!"' in read_answer(client)
        # Between two requests uvicorn's own deadline counts.
        time.sleep(2 * TIMEOUT_S)
        client.sendall(HEALTH + b"\r\n")
        assert read_answer(client).startswith(b"HTTP/1.1 200")
