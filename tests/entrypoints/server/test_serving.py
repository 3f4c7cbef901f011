"""The queue, the end of a client, of the engine and of the server."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx2
import pytest

from outrider.errors import ContextLengthError
from tests.entrypoints.server.app_client import BASE_URL, AppClient, error_of
from tests.entrypoints.server.scripted_llm import HELLO, Part, ScriptedLLM

ENDLESS: list[Part | None] = [Part("a", [1]), None]


def together(client: AppClient, work: Callable[[httpx2.AsyncClient], Awaitable[Any]]) -> Any:
    """Runs requests at once, in one event loop."""

    async def run() -> Any:
        async with (
            asyncio.timeout(20),
            httpx2.AsyncClient(transport=client.transport(), base_url=BASE_URL) as http,
        ):
            return await work(http)

    return asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def post(http: httpx2.AsyncClient, **body: Any) -> Awaitable[httpx2.Response]:
    return http.post("/v1/completions", json={"prompt": "a", **body})


def test_past_the_queue_the_answer_is_to_come_later_and_then_there_is_room() -> None:
    llm = ScriptedLLM(ENDLESS)
    client = AppClient.over(llm, max_num_queued=2)

    async def work(http: httpx2.AsyncClient) -> None:
        running = [asyncio.create_task(post(http, n=2)) for _ in range(3)]
        await until(lambda: len(llm.open_ids) == 3)
        for is_streamed in (False, True):
            refused = await post(http, stream=is_streamed)
            assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        running[0].cancel()
        await until(lambda: len(llm.open_ids) == 2)
        last = asyncio.create_task(post(http, n=2))
        await until(lambda: len(llm.open_ids) == 3)
        assert (await post(http)).status_code == 429
        for task in (*running, last):
            task.cancel()
        await asyncio.gather(*running, last, return_exceptions=True)

    together(client, work)
    assert not llm.open_ids
    llm.script = HELLO
    assert client.complete(n=6).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
def test_a_client_that_leaves_aborts_its_requests(is_streamed: bool, prompt: Any) -> None:
    llm = ScriptedLLM(ENDLESS)
    client = AppClient.over(llm)
    body = {"prompt": prompt, "stream": is_streamed}
    asyncio.run(leave(client, llm, body, len(prompt)))
    assert len(llm.closed_ids) == len(prompt)
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    assert f"{aborted} {float(len(prompt))}" in client.get("/metrics").text
    llm.script = HELLO
    assert client.complete().status_code == 200


async def leave(client: AppClient, llm: ScriptedLLM, body: dict[str, Any], count: int) -> None:
    """Speaks ASGI itself: sends a request, and leaves once it runs."""
    import json

    has_left = asyncio.Event()
    sent = []
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
    }
    running = asyncio.create_task(client.transport().app(scope, receive, send))  # type: ignore[arg-type]
    await until(lambda: len(llm.open_ids) == count)
    await asyncio.sleep(0.01)
    has_left.set()
    async with asyncio.timeout(5):
        await running
    assert not llm.open_ids
    # Whether anything was answered shows that the two ways were really taken.
    assert (sent[0]["status"] == 200) == body["stream"]


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_when_the_engine_dies_the_answer_says_so(prompt: Any) -> None:
    for dies_after, is_streamed in ((0, False), (0, True), (1, False)):
        client = AppClient.over(ScriptedLLM(HELLO, dies_after=dies_after))
        response = client.complete(prompt=prompt, stream=is_streamed)
        assert (response.status_code, error_of(response)["type"]) == (503, "server_error")
        assert client.get("/health").status_code == 503
        assert client.complete().status_code == 503
        assert client.get("/metrics").status_code == 200


def test_why_the_engine_died_is_logged_once_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    client = AppClient.over(ScriptedLLM(HELLO, dies_after=1))
    response = client.complete(prompt=["a", "b"])
    assert "why it died" not in response.text
    assert client.complete().status_code == 503
    assert caplog.text.count("KeyError: 'why it died'") == 1


def test_an_error_in_the_midst_of_a_stream_is_told_in_the_stream() -> None:
    response = AppClient.over(ScriptedLLM(HELLO, dies_after=2)).complete(stream=True)
    *_, last, end = response.text.split("\n\n")
    assert response.status_code == 200
    assert last.startswith('data: {"error":{"message":"the engine has stopped')
    assert end == ""


def test_a_request_that_the_engine_refuses_is_told_before_anything_runs() -> None:
    llm = ScriptedLLM(HELLO, refusal="num_speculative_tokens 7 is more than the engine's 3")
    response = AppClient.over(llm).complete(num_speculative_tokens=7, stream=True)
    assert (response.status_code, error_of(response)["param"]) == (400, "num_speculative_tokens")
    assert not llm.closed_ids
    second = AppClient.over(ScriptedLLM(HELLO)).complete(prompt=["a", ""], stream=True)
    assert (second.status_code, error_of(second)["param"]) == (400, "prompt[1]")


def test_a_prompt_that_is_too_long_has_the_code_that_clients_know() -> None:
    class ShortLLM(ScriptedLLM):
        def check_request(self, *_: object) -> None:
            raise ContextLengthError("the prompt has 9 tokens, and the maximum context length is 8")

    client = AppClient.over(ShortLLM(HELLO))
    for response, param in ((client.complete(), "prompt"), (client.chat(), "messages")):
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, param)
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_server_that_ends_takes_nothing_more_and_aborts_what_runs(is_streamed: bool) -> None:
    llm = ScriptedLLM(ENDLESS)
    client = AppClient.over(llm)

    async def work(http: httpx2.AsyncClient) -> httpx2.Response:
        running = asyncio.create_task(post(http, stream=is_streamed))
        await until(lambda: len(llm.open_ids) == 1)
        client.api.serving.is_draining = True
        refused = await post(http)
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert (await http.get("/health")).status_code == 503
        assert not running.done()
        await client.api.serving.abort_all()
        return await running

    response = together(client, work)
    assert "shutting down" in response.text
    assert response.status_code == (200 if is_streamed else 503)
    assert "[DONE]" not in response.text
    assert not llm.open_ids


def test_all_that_runs_is_aborted_at_once() -> None:
    """One abort waits for a step of the engine; one for each request would wait for as many."""
    llm = ScriptedLLM(ENDLESS)
    client = AppClient.over(llm)

    async def work(http: httpx2.AsyncClient) -> list[httpx2.Response]:
        bodies: list[dict[str, Any]] = [{}, {"prompt": ["a", "b"]}, {"stream": True}]
        running = [asyncio.create_task(post(http, **body)) for body in bodies]
        await until(lambda: len(llm.open_ids) == 4)
        await client.api.serving.abort_all()
        return await asyncio.gather(*running)

    responses = together(client, work)
    assert all("shutting down" in response.text for response in responses)
    assert (len(llm.aborted_ids), llm.num_aborts) == (4, 1)


def test_what_the_engine_did_not_know_yet_is_aborted_too() -> None:
    """Such as a request whose grammar was being compiled: its output comes after the abort."""

    class LateLLM(ScriptedLLM):
        async def abort(self, request_ids: Iterable[str]) -> None:
            del request_ids

    llm = LateLLM(ENDLESS)
    client = AppClient.over(llm)

    async def work(http: httpx2.AsyncClient) -> httpx2.Response:
        running = asyncio.create_task(post(http))
        await until(lambda: len(llm.open_ids) == 1)
        await client.api.serving.abort_all()
        llm.script[1] = Part("b", [2])
        return await running

    assert together(client, work).status_code == 503


def test_a_full_queue_is_told_before_the_prompt_is_read() -> None:
    llm = ScriptedLLM(ENDLESS)
    client = AppClient.over(llm, max_num_queued=0)

    async def work(http: httpx2.AsyncClient) -> None:
        running = [asyncio.create_task(post(http, n=2)) for _ in range(2)]
        await until(lambda: len(llm.open_ids) == 2)
        chat = {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"x": 1}}
        answers = [
            await post(http, logit_bias={"x": 1}),
            await http.post("/v1/chat/completions", json=chat),
        ]
        assert [answer.status_code for answer in answers] == [429, 429]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    together(client, work)
    assert client.complete(logit_bias={"x": 1}).status_code == 400


def test_a_defect_is_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenLLM(ScriptedLLM):
        def check_request(self, *_: object) -> None:
            raise KeyError("secret")

    client = AppClient.over(BrokenLLM(HELLO))
    transport = httpx2.ASGITransport(app=client.transport().app, raise_app_exceptions=False)

    async def ask() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=transport, base_url=BASE_URL) as http:
            return await post(http)

    response = asyncio.run(ask())
    assert (response.status_code, "secret" in response.text) == (500, False)
    assert "secret" in caplog.text
