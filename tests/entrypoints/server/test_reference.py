"""What the server tells of probabilities, against the Python API on the same checkpoint with K = 0.

Cases C14, C15 and C16, over HTTP and with drafts.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from outrider import LLM, SamplingParams
from outrider.entrypoints.async_llm import AsyncLLM
from outrider.entrypoints.server.engine_client import AsyncLLMClient
from outrider.entrypoints.server.run import served_model
from tests.entrypoints.server.app_client import BASE_URL, AppClient, events

# As tokens: longer than a step of the server, which takes 32 rows.
PROMPT = [100 + 7 * i % 3000 for i in range(70)]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> LLM:
    return LLM(model_dir, max_model_len=128)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_are_those_of_plain_decoding(mode: str, guessing_dir: Path) -> None:
    options: dict[str, Any] = {"logprobs_mode": mode, "max_model_len": 64}
    params = SamplingParams(
        temperature=0, max_tokens=40, logprobs=5, ignore_eos=True, repetition_penalty=1.01
    )
    (reference,) = LLM(guessing_dir, **options).generate([PROMPT[:9]], params)
    speculative = {"method": "mtp", "num_speculative_tokens": 3}
    llm = AsyncLLM(guessing_dir, speculative_config=speculative, **options)
    try:
        client = AppClient.over(AsyncLLMClient(llm), served_model(llm, guessing_dir))
        answer = client.complete(
            prompt=PROMPT[:9],
            temperature=0,
            max_tokens=40,
            logprobs=5,
            ignore_eos=True,
            repetition_penalty=1.01,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            return_spec_decode_stats=True,
        ).json()
    finally:
        llm.shutdown()
    # Tokens of windows, not of their first rows alone.
    assert answer["spec_decode_stats"]["num_accepted_tokens"] > 3
    choice = answer["choices"][0]
    expected = reference.outputs[0]
    assert choice["token_ids"] == expected.token_ids
    assert expected.logprobs is not None
    told = choice["logprobs"]
    for i, (token_id, position) in enumerate(
        zip(expected.token_ids, expected.logprobs, strict=True)
    ):
        logprob = max(position[token_id].logprob, -9999.0)
        assert told["token_logprobs"][i] == pytest.approx(logprob, abs=TOLERANCE)
        assert told["token_logprobs"][i] <= 0
        top = told["top_logprobs"][i]
        assert f"token_id:{token_id}" in top
        assert len(top) >= 5
        for one_id, one in position.items():
            wanted = max(one.logprob, -9999.0)
            assert top[f"token_id:{one_id}"] == pytest.approx(wanted, abs=TOLERANCE)


# A step takes 32 rows, so prompts of these lengths end in, before and after its end.
@pytest.mark.parametrize("length", [1, 2, 30, 31, 32, 33, 34, 62, 63, 64, 65, 66])
def test_log_probabilities_of_prompts_are_those_of_plain_decoding(
    length: int, plain: LLM, real_client: AppClient
) -> None:
    prompt = PROMPT[:length]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    expected = plain.generate([prompt], params)[0].prompt_logprobs
    answer = real_client.complete(prompt=prompt, temperature=0, max_tokens=1, prompt_logprobs=2)
    told = answer.json()["choices"][0]["prompt_logprobs"]
    assert expected is not None
    assert len(told) == length
    assert told[0] is None
    for token_id, position, wanted in zip(prompt[1:], told[1:], expected[1:], strict=True):
        assert wanted is not None
        found = position[str(token_id)]
        assert found["logprob"] == pytest.approx(wanted[token_id].logprob, abs=TOLERANCE)
        assert -9999.0 < found["logprob"] <= 0


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("top_k", [0, 1])
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_echo_with_log_probabilities(
    max_tokens: int, top_k: int, temperature: int, real_client: AppClient
) -> None:
    body = {
        "prompt": PROMPT[:40],
        "echo": True,
        "logprobs": 1,
        "max_tokens": max_tokens,
        "top_k": top_k,
        "temperature": temperature,
        "ignore_eos": True,
        "seed": 3,
    }
    response = real_client.complete(**body)
    assert response.status_code == 200, response.text
    assert "Infinity" not in response.text
    choice = response.json()["choices"][0]
    prompt = real_client.post("/detokenize", {"tokens": PROMPT[:40]}).json()["prompt"]
    assert choice["text"].startswith(prompt)
    assert (choice["text"] == prompt) == (max_tokens == 0)
    logprobs = choice["logprobs"]
    assert [len(values) for values in logprobs.values()] == [40 + max_tokens] * 4
    assert logprobs["token_logprobs"][0] is None
    assert all(-9999.0 <= value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert response.json()["usage"]["completion_tokens"] == max_tokens
    # And the stream of it says the same.
    parts = [chunk["choices"][0] for chunk in events(real_client.complete(**body, stream=True))]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, values in logprobs.items():
        assert [one for part in parts for one in part["logprobs"][name]] == values


def test_processed_log_probabilities_of_what_cannot_be_chosen_are_valid_json(
    model_dir: Path,
) -> None:
    llm = AsyncLLM(model_dir, logprobs_mode="processed_logprobs", max_model_len=64)
    try:
        client = AppClient.over(AsyncLLMClient(llm), served_model(llm, model_dir))
        response = client.complete(
            prompt=PROMPT[:5], logprobs=3, top_k=1, max_tokens=3, ignore_eos=True
        )
    finally:
        llm.shutdown()
    assert response.status_code == 200
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [0.0] * 3
    assert all(-9999.0 in top.values() for top in logprobs["top_logprobs"])


def test_a_text_of_the_server_is_that_of_plain_decoding(plain: LLM, real_client: AppClient) -> None:
    prompts = [PROMPT[:n] for n in (3, 17, 33, 50)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [one.outputs[0].text for one in plain.generate(prompts, params)]
    answer = real_client.complete(prompt=prompts, temperature=0, max_tokens=20, ignore_eos=True)
    assert [choice["text"] for choice in answer.json()["choices"]] == expected


@pytest.mark.parametrize("k", [1, 5, 7])
def test_texts_together_are_those_of_each_alone(k: int, guessing_dir: Path) -> None:
    """Tokens and what drafting brought, beside requests of other lengths; one has a ban."""
    options: dict[str, Any] = {"dtype": "float64", "max_model_len": 96}
    bodies = [
        {"prompt": PROMPT[start : start + length], "logit_bias": bias}
        for start, length, bias in (
            *((length, length, None) for length in (3, 9, 17, 33)),
            (0, 20, {str(PROMPT[3]): -100}),
        )
    ]
    plain = LLM(guessing_dir, **options)
    expected = []
    for body in bodies:
        bias = {int(one): value for one, value in (body["logit_bias"] or {}).items()}
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias=bias)
        (output,) = plain.generate([body["prompt"]], params)
        expected.append(output.outputs[0].token_ids)
    speculative = {"method": "mtp", "num_speculative_tokens": k}
    llm = AsyncLLM(
        guessing_dir,
        speculative_config=speculative,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
        **options,
    )
    try:
        client = AppClient.over(AsyncLLMClient(llm), served_model(llm, guessing_dir))
        fields = {
            "temperature": 0,
            "max_tokens": 30,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_spec_decode_stats": True,
        }
        alone = [client.complete(**body, **fields).json() for body in bodies]

        async def ask() -> list[dict[str, Any]]:
            async with httpx2.AsyncClient(
                transport=client.transport(), base_url=BASE_URL, timeout=60
            ) as http:
                asked = [http.post("/v1/completions", json={**body, **fields}) for body in bodies]
                return [answer.json() for answer in await asyncio.gather(*asked)]

        together = asyncio.run(ask())
    finally:
        llm.shutdown()
    for one, other, token_ids in zip(alone, together, expected, strict=True):
        assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"] == token_ids
        assert one["spec_decode_stats"] == other["spec_decode_stats"]
    assert sum(one["spec_decode_stats"]["num_accepted_tokens"] for one in alone) > 5
