"""The official client of OpenAI, unchanged, against a real engine behind a socket."""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import openai
import pytest

from outrider.entrypoints.async_llm import AsyncLLM
from outrider.entrypoints.server.chat_protocol import ChatBody
from outrider.entrypoints.server.protocol import CompletionBody
from tests.entrypoints.server.running_server import RunningServer

MESSAGES: Any = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": [{"type": "text", "text": "def f("}]},
]
# A value of every field, as the client's own argument or as one of vLLM's in `extra_body`.
SHARED: dict[str, Any] = {
    "model": "tiny",
    "n": 2,
    "max_tokens": 5,
    "temperature": 0.9,
    "top_p": 0.9,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"7": -50, "8": 5},
    "stop": ["zzz", "yyy"],
    "user": "somebody",
    "stream": False,
}
EXTRA: dict[str, Any] = {
    "min_tokens": 2,
    "top_k": 50,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "stop_token_ids": [9],
    "bad_words": ["zzz"],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
    "num_speculative_tokens": 2,
    "rejection_sample_method": "standard",
    "cache_salt": "pepper",
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_spec_decode_stats": True,
    "return_decode_steps": True,
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "stream_options": None,
    "response_format": {"type": "text"},
    # Of more characters than the tokens that there is room for.
    "structured_outputs": {"regex": "[a-z ]{99}"},
}


def test_every_field_of_a_completion(openai_client: openai.OpenAI) -> None:
    own = {**SHARED, "prompt": ["def f(", "import"], "echo": True, "logprobs": 2, "best_of": 2}
    assert {*own, *EXTRA} == set(CompletionBody.model_fields)
    answer = openai_client.completions.create(**own, extra_body=EXTRA)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("def f(")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) == len(choice.prompt_token_ids) + 5  # type: ignore[attr-defined]
    assert answer.spec_decode_stats["num_draft_tokens"] > 0  # type: ignore[attr-defined]


def test_every_field_of_a_chat(openai_client: openai.OpenAI) -> None:
    own = {
        **SHARED,
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "reasoning_effort": "none",
    }
    extra = {
        **EXTRA,
        "max_completion_tokens": 5,
        "include_reasoning": True,
        "chat_template_kwargs": {},
    }
    assert {*own, *extra} == set(ChatBody.model_fields)
    answer = openai_client.chat.completions.create(**own, extra_body=extra)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(one.top_logprobs) for one in choice.logprobs.content] == [2] * 5


def test_no_field_of_the_client_is_unknown(openai_client: openai.OpenAI) -> None:
    of_transport = {"extra_headers", "extra_query", "extra_body", "timeout"}
    for create, body in (
        (openai_client.completions.create, CompletionBody),
        (openai_client.chat.completions.create, ChatBody),
    ):
        names = set(signature(create).parameters) - of_transport
        assert names <= {*body.model_fields, *body.UNSUPPORTED}


def text_of(stream: Any) -> tuple[dict[int, str], Any]:
    """Texts of the choices of a stream, and its usage."""
    texts: dict[int, str] = {}
    usage = None
    for chunk in stream:
        assert usage is None, "the usage is not in the last chunk"
        usage = chunk.usage
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return texts, usage


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5, "n": 3}, {"stop": "e"}])
def test_a_stream_says_what_the_answer_in_one_piece_says(
    openai_client: openai.OpenAI, options: dict[str, Any]
) -> None:
    shared = {"model": "tiny", "max_tokens": 12, "seed": 3, **options}
    usage_option = {"include_usage": True}
    # Each is the first of its kind: nothing of a prompt comes from the cache.
    first, second = ({"cache_salt": f"{options} {name}"} for name in ("whole", "streamed"))
    whole = openai_client.completions.create(prompt="import os", extra_body=first, **shared)
    stream = openai_client.completions.create(
        prompt="import os",
        stream=True,
        stream_options=usage_option,
        extra_body=second,
        **shared,
    )
    texts, usage = text_of(stream)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert usage == whole.usage
    chat = openai_client.chat.completions.create(messages=MESSAGES, extra_body=first, **shared)
    stream = openai_client.chat.completions.create(
        messages=MESSAGES,
        stream=True,
        stream_options=usage_option,
        extra_body=second,
        **shared,
    )
    texts, usage = text_of(stream)
    assert texts == {choice.index: choice.message.content for choice in chat.choices}
    assert usage == chat.usage


def test_the_raw_chunks_of_a_stream(openai_client: openai.OpenAI) -> None:
    create = openai_client.completions.create
    body: dict[str, Any] = {"model": "tiny", "prompt": "a", "n": 2, "max_tokens": 9, "stream": True}
    plain = list(create(**body, extra_body={"ignore_eos": True, "return_token_ids": True}))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    chunks = list(
        create(
            **body,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    )
    *content, last = chunks
    assert all(chunk.usage is None for chunk in content)
    assert (last.choices, last.usage.completion_tokens) == ([], 18)
    parts = [choice for chunk in content for choice in chunk.choices]
    assert sum(len(choice.token_ids) for choice in parts) == 18
    for index in range(2):
        reasons = [choice.finish_reason for choice in parts if choice.index == index]
        assert [reason for reason in reasons if reason] == ["length"]


def test_models(openai_client: openai.OpenAI) -> None:
    (card,) = openai_client.models.list().data
    assert card.id == openai_client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served"):
        openai_client.models.retrieve("gpt")


def test_errors_are_the_clients_own(openai_client: openai.OpenAI) -> None:
    create = openai_client.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny", prompt="a", temperature=-1, stream=True)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"guided_regex": "a"}
        )
    assert (caught.value.param, caught.value.code) == ("guided_regex", "unsupported_parameter")


def seeded(client: openai.OpenAI, **options: Any) -> list[list[int]]:
    answer = client.completions.create(
        model="tiny",
        **{"prompt": "import os", "seed": 42, "max_tokens": 12, "temperature": 1, **options},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return [choice.token_ids for choice in answer.choices]  # type: ignore[attr-defined]


def test_a_seed_gives_one_text_whoever_else_runs(openai_client: openai.OpenAI) -> None:
    alone = seeded(openai_client)
    for seed in range(20):
        seeded(openai_client, seed=seed, max_tokens=1 + seed % 4)
    assert seeded(openai_client) == alone
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        seeds = [42, 1, 2, 3, 42, 4, 5, 6]
        found = list(pool.map(lambda seed: seeded(openai_client, seed=seed), seeds))
    assert found[0] == found[4] == alone
    assert seeded(openai_client, seed=43) != alone


def test_copies_differ_and_a_seed_gives_the_same_ones_again(openai_client: openai.OpenAI) -> None:
    first = seeded(openai_client, n=4)
    assert len({tuple(ids) for ids in first}) == 4
    assert seeded(openai_client, n=4) == first
    assert seeded(openai_client, n=1) == first[:1]
    unseeded = seeded(openai_client, n=4, seed=None)
    assert len({tuple(ids) for ids in unseeded}) == 4
    assert unseeded != first
    with pytest.raises(openai.BadRequestError) as caught:
        seeded(openai_client, n=4, best_of=2)
    assert caught.value.param == "best_of"


def test_the_draft_length_of_a_request_is_its_own(openai_client: openai.OpenAI) -> None:
    def stats(**extra: Any) -> dict[str, Any]:
        answer = openai_client.completions.create(
            model="tiny",
            prompt="import os",
            max_tokens=10,
            temperature=0,
            extra_body={"return_spec_decode_stats": True, "ignore_eos": True, **extra},
        )
        return answer.spec_decode_stats  # type: ignore[attr-defined,no-any-return]

    assert stats(num_speculative_tokens=0)["num_draft_tokens"] == 0
    one, three = stats(num_speculative_tokens=1), stats()
    assert one["num_draft_tokens"] == one["num_drafts"] > 0
    assert three["num_draft_tokens"] > 2 * three["num_drafts"] > 0


def counters(server: RunningServer) -> Iterator[tuple[str, float]]:
    import httpx2

    for line in httpx2.get(f"{server.url}/metrics", timeout=20).text.splitlines():
        if line.startswith("vllm:spec_decode") and "_created" not in line:
            name, _, value = line.rpartition(" ")
            yield name.partition("{")[0] + name.partition("position=")[2].rstrip("}"), float(value)


def test_figures_of_requests_add_up_to_the_counters(
    openai_client: openai.OpenAI, real_server: RunningServer, async_llm: AsyncLLM
) -> None:
    before = dict(counters(real_server))
    asks = {"return_spec_decode_stats": True}
    told = [
        openai_client.completions.create(
            model="tiny", prompt=prompt, n=n, max_tokens=9, stop=stop, extra_body={**asks, **extra}
        ).spec_decode_stats  # type: ignore[attr-defined]
        for prompt, n, stop, extra in (
            ("a", 1, None, {}),
            ("b", 3, "e", {"num_speculative_tokens": 2}),
            (["c", "d"], 2, None, {"rejection_sample_method": "block"}),
            ("e", 1, None, {"num_speculative_tokens": 0}),
        )
    ]
    *_, last = openai_client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=11, n=2, stream=True, extra_body=asks
    )
    told.append(last.spec_decode_stats)  # type: ignore[attr-defined]
    after = dict(counters(real_server))

    def rise(counter: str) -> float:
        return after[counter] - before[counter]

    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert rise(f"vllm:spec_decode_{name}_total") == sum(one[name] for one in told)
    for position in range(3):
        counter = f'vllm:spec_decode_num_accepted_tokens_per_pos_total"{position}"'
        assert rise(counter) == sum(one["num_accepted_tokens_per_pos"][position] for one in told)
    assert async_llm.llm_engine.metrics.num_drafts == after["vllm:spec_decode_num_drafts_total"]
