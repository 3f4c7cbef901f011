"""The prefix cache through the Python API."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.entrypoints.async_llm import AsyncLLM
from outrider.entrypoints.llm import LLM
from outrider.errors import RequestError
from outrider.sampling_params import SamplingParams
from tests.text_checkpoint import write_text_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
IDS = [5, 9, 7, 6, 8, 9, 5, 7, 6, 5]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("prefix") / "tiny")


def options(**given: Any) -> dict[str, Any]:
    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    return {"speculative_config": speculative, "block_size": 4, "dtype": "float64", **given}


def cached(llm: LLM, prompt: Any, params: SamplingParams = PARAMS) -> int | None:
    (output,) = llm.generate(prompt, params)
    return output.num_cached_tokens


def test_a_prompt_that_comes_again(model_dir: Path) -> None:
    llm = LLM(model_dir, **options())
    assert [cached(llm, {"prompt_token_ids": IDS}) for _ in range(2)] == [0, 8]
    salted = {"prompt_token_ids": IDS, "cache_salt": "a"}
    assert [cached(llm, salted) for _ in range(2)] == [0, 8]
    # Of several completions the first is told, which the others do not wait for.
    assert cached(llm, {"prompt_token_ids": IDS}, SamplingParams(n=3, max_tokens=2, seed=1)) == 8
    llm.reset_prefix_cache()
    assert cached(llm, {"prompt_token_ids": IDS}) == 0
    assert cached(LLM(model_dir, **options(enable_prefix_caching=False)), [IDS]) is None


@pytest.mark.parametrize("salt", [1, "", ["a"]])
def test_a_salt_is_a_text(model_dir: Path, salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt must be a text"):
        LLM(model_dir, **options()).generate({"prompt": "a", "cache_salt": salt})


def test_with_an_event_loop(model_dir: Path) -> None:
    async def run() -> list[int | None]:
        llm = AsyncLLM(model_dir, **options())
        told = []
        for number, salt in enumerate(("a", "a", "b")):
            prompt = {"prompt_token_ids": IDS, "cache_salt": salt}
            async for output in llm.generate(prompt, PARAMS, str(number)):
                last = output
            told.append(last.num_cached_tokens)
        llm.shutdown()
        return told

    assert asyncio.run(run()) == [0, 8, 0]
