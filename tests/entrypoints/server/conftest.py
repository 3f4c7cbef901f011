"""A server over a real engine on the tiny checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from outrider.entrypoints.async_llm import AsyncLLM
from outrider.entrypoints.server.engine_client import AsyncLLMClient
from outrider.entrypoints.server.run import served_model
from tests.entrypoints.server.app_client import AppClient
from tests.entrypoints.server.running_server import RunningServer, running_server
from tests.text_checkpoint import write_guessing_checkpoint


@pytest.fixture(scope="session")
def guessing_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of whose drafts some are accepted."""
    return write_guessing_checkpoint(tmp_path_factory.mktemp("guessing") / "tiny")


@pytest.fixture(scope="session")
def async_llm(model_dir: Path) -> Iterator[AsyncLLM]:
    """With drafts, and steps so short that a longer prompt runs in pieces."""
    llm = AsyncLLM(
        model_dir,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    )
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def real_client(async_llm: AsyncLLM, model_dir: Path) -> AppClient:
    """Of an application in this process, over the engine, that looks for thoughts and calls."""
    return AppClient.over(
        AsyncLLMClient(async_llm),
        served_model(async_llm, model_dir),
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
        enable_auto_tool_choice=True,
    )


@pytest.fixture(scope="session")
def real_server(async_llm: AsyncLLM, model_dir: Path) -> Iterator[RunningServer]:
    """Behind a socket, over the engine."""
    model = served_model(async_llm, model_dir)
    with running_server(AsyncLLMClient(async_llm), model) as running:
        yield running


@pytest.fixture(scope="session")
def openai_client(real_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{real_server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client
