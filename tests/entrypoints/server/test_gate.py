import json
import logging

import pytest

from tests.entrypoints.server.app_client import AppClient, error_of
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM


def client(**options: object) -> AppClient:
    return AppClient.over(ScriptedLLM(HELLO), **options)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("LocalHost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.1", 403),
        ("localhost:8000:1", 403),
        ("user@localhost", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_server_pass(host: str, status: int) -> None:
    response = client().get("/health", headers={"host": host})
    assert response.status_code == status
    if status == 403:
        assert error_of(response)["param"] == "host"


def test_further_hosts_are_allowed_by_name() -> None:
    served = client(allowed_host=("box.example",))
    assert served.get("/health", headers={"host": "Box.example:80"}).status_code == 200
    assert served.get("/health", headers={"host": "other.example"}).status_code == 403
    assert client(allowed_host=("*",)).get("/health", headers={"host": "x"}).status_code == 200


def test_an_address_passes_where_all_addresses_are_listened_on() -> None:
    served = client(host="0.0.0.0", allow_unauthenticated=True)
    assert served.get("/health", headers={"host": "10.0.0.1:80"}).status_code == 200
    assert served.get("/health", headers={"host": "evil.example"}).status_code == 403


PATHS = ["/v1/models", "/version", "/metrics", "/openapi.json", "/nothing"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer secret2",
        "secret",
        "Basic secret",
        "Bearer s\xe9",
    ],
)
def test_without_the_key_nothing_is_told(path: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = client(api_key="secret").get(path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert error_of(response)["code"] == "invalid_api_key"


def test_with_the_key_all_is_open_and_health_is_without() -> None:
    served = client(api_key="secret")
    headers = {"authorization": "bearer secret"}
    assert served.get("/v1/models", headers=headers).status_code == 200
    assert served.get("/health").status_code == 200
    assert served.complete().status_code == 401


def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def compare(given: bytes, wanted: bytes) -> bool:
        lengths.append((len(given), len(wanted)))
        return given == wanted

    monkeypatch.setattr("outrider.entrypoints.server.gate.hmac.compare_digest", compare)
    served = client(api_key="secret")
    for key in ("x", "secret", "secret" * 100):
        served.get("/version", headers={"authorization": f"Bearer {key}"})
    assert lengths == [(32, 32)] * 3


def test_request_ids_come_back_and_unfit_ones_are_replaced() -> None:
    served = client()
    assert served.get("/health", headers={"x-request-id": "a-1"}).headers["x-request-id"] == "a-1"
    for unfit in ("", "a b", "x" * 129, "é"):
        headers = {"x-request-id": unfit.encode("latin-1")}
        given = served.get("/health", headers=headers).headers["x-request-id"]
        assert len(given) == 32
    wrong = served.get("/nothing", headers={"x-request-id": "b"})
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (404, "b")


def test_each_request_has_a_line_in_the_log_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "outrider.entrypoints.server"):
        client().complete(prompt="private words", user="somebody")
    (line,) = [json.loads(record.message) for record in caplog.records]
    assert line.pop("duration_s") >= 0
    assert len(line.pop("request_id")) == 32
    assert line == {
        "event": "request",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "finish_reasons": ["stop"],
    }
    assert "private" not in caplog.text


def test_no_answer_lets_another_site_read_it() -> None:
    served = client()
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    asked = served.request("OPTIONS", "/v1/completions", headers=headers)
    assert asked.status_code == 405
    answered = served.get("/v1/models", headers={"origin": "http://evil.example"})
    for response in (asked, answered):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_what_a_page_may_send_unasked_is_refused(content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = client().post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
    assert (response.status_code, error_of(response)["param"]) == (415, "content-type")
