"""What a client is told of the prefix cache, and how it keeps to itself."""

from tests.entrypoints.server.app_client import AppClient, events
from tests.entrypoints.server.scripted_llm import HELLO, ScriptedLLM


def test_usage_tells_the_cached_tokens_of_all_prompts() -> None:
    client = AppClient.over(ScriptedLLM(HELLO, num_cached_tokens=2))
    body = {"prompt": [[1, 2, 3], [1, 2, 4]]}
    usage = client.complete(**body).json()["usage"]
    assert usage["prompt_tokens"] == 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert events(client.complete(**body, **options))[-1]["usage"] == usage
    usage = client.chat().json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_none_found_is_told_too() -> None:
    usage = AppClient.over(ScriptedLLM(HELLO, num_cached_tokens=0)).chat().json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_an_engine_without_one_says_nothing_of_it() -> None:
    assert "prompt_tokens_details" not in AppClient.over(ScriptedLLM(HELLO)).chat().json()["usage"]


def test_the_salt_reaches_every_prompt() -> None:
    llm = ScriptedLLM(HELLO)
    client = AppClient.over(llm)
    assert client.complete(prompt=["a", "b"], cache_salt="mine").status_code == 200
    assert client.chat(cache_salt="other").status_code == 200
    assert client.chat().status_code == 200
    assert [prompt.cache_salt for prompt in llm.prompts] == ["mine", "mine", "other", None]
