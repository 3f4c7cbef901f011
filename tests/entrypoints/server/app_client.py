"""A client of an application that runs in the same process, without a socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx2

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.config import ServerConfig
from outrider.entrypoints.chat_renderer import ChatRenderer
from outrider.entrypoints.server.app import Api, ServedModel, build_app
from outrider.entrypoints.server.gate import Gate
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer

if TYPE_CHECKING:
    from outrider.entrypoints.server.engine_client import EngineClient

BASE_URL = "http://localhost"


@cache
def bundled_tokenizer() -> Tokenizer:
    """Read once."""
    return Tokenizer.from_pretrained(BUNDLED_MODEL_DIR)


def bundled_served_model(**changes: Any) -> ServedModel:
    """What the server knows of a checkpoint with the bundled tokenizer."""
    values: dict[str, Any] = {
        "tokenizer": bundled_tokenizer(),
        "model_dir": BUNDLED_MODEL_DIR,
        "chat_renderer": ChatRenderer(bundled_tokenizer(), BUNDLED_MODEL_DIR),
        "default_params": SamplingParams(),
        "max_new_tokens": None,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_logprobs": 20,
        "num_speculative_tokens": 3,
    }
    return ServedModel(**{**values, **changes})


@dataclass
class AppClient:
    """Sends requests one after the other, each in an event loop of its own."""

    api: Api
    config: ServerConfig

    def __post_init__(self) -> None:
        self.app = Gate(build_app(self.api), self.config)

    @classmethod
    def over(cls, llm: EngineClient, model: ServedModel | None = None, **options: Any) -> AppClient:
        config = ServerConfig(**options).with_model_name("tiny")
        return cls(Api(llm, model or bundled_served_model(), config), config)

    def transport(self) -> httpx2.ASGITransport:
        return httpx2.ASGITransport(app=self.app)

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        async def send() -> httpx2.Response:
            async with httpx2.AsyncClient(
                transport=self.transport(), base_url=BASE_URL, timeout=60
            ) as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: object = None, **options: Any) -> httpx2.Response:
        if body is not None:
            headers = {"content-type": "application/json", **options.pop("headers", {})}
            options = {"content": json.dumps(body).encode(), "headers": headers, **options}
        return self.request("POST", path, **options)

    def complete(self, **body: Any) -> httpx2.Response:
        return self.post("/v1/completions", {"prompt": "a b", **body})

    def chat(self, **body: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.post("/v1/chat/completions", {"messages": messages, **body})


def events(response: httpx2.Response) -> list[Any]:
    """The chunks of a stream, the last of which must say that it is the last."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), response.text
    assert lines[-1] == "data: [DONE]", response.text
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error of a response, which has all its fields."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error
