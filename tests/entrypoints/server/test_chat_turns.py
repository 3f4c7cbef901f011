"""A chat that grows and comes again, at a running server: what is reused, and that it says so.

In float64, where a text after a hit and the text of a server that keeps nothing are equal.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from outrider.entrypoints.async_llm import AsyncLLM
from tests.entrypoints.server.app_client import events
from tests.entrypoints.server.metric_figures import figures
from tests.entrypoints.server.running_server import served_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import httpx2

BLOCK, K = 8, 3
COUNTERS = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")


@dataclass
class Said:
    """An answer.

    Attributes:
        num_prompt_tokens: as usage tells them.
        token_ids: of the output.
        text: of the output.
        steps: the passes behind it.
        num_cached_tokens: as usage tells them; None where it tells nothing of them.
    """

    num_prompt_tokens: int
    token_ids: list[int]
    text: str
    steps: list[dict[str, Any]]
    num_cached_tokens: int | None


@dataclass
class Turns:
    """Asks a server for one answer after the other.

    Attributes:
        llm: behind it.
        http: a client of it.
        first_rows: position of the first row of each request that has run.
    """

    llm: AsyncLLM
    http: httpx2.Client
    first_rows: list[int]

    def ask(self, path: str, *, stream: bool = False, **asked: Any) -> Said:
        """One answer, of which is checked that what is said to be reused did not run."""
        body = {
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_decode_steps": True,
            **asked,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        before = self._counters()
        response = self.http.post(f"/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        said = _read(events(response) if stream else [response.json()])
        told = said.num_cached_tokens or 0
        assert self.first_rows.pop() == told
        added = [now - then for now, then in zip(self._counters(), before, strict=True)]
        assert added == ([told, said.num_prompt_tokens] if self._keeps else [0, 0])
        assert (said.num_cached_tokens is not None) == self._keeps
        return said

    @property
    def _keeps(self) -> bool:
        return self.llm.llm_engine.config.enable_prefix_caching

    def _counters(self) -> list[float]:
        found = figures(self.http.get("/metrics").text)
        return [found[name] for name in COUNTERS]


def _read(parts: Sequence[dict[str, Any]]) -> Said:
    """A whole answer, or the chunks of one."""
    choices = [choice for part in parts for choice in part["choices"]]
    messages = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    usage = parts[-1]["usage"]
    details = usage.get("prompt_tokens_details")
    return Said(
        usage["prompt_tokens"],
        [one for choice in choices for one in choice.get("token_ids") or ()],
        "".join(one.get("content") or one.get("text") or "" for one in messages),
        [one for choice in choices for one in choice.get("decode_steps") or ()],
        None if details is None else details["cached_tokens"],
    )


@contextmanager
def turns(checkpoint: Path, **options: Any) -> Iterator[Turns]:
    llm = AsyncLLM(
        checkpoint,
        speculative_config={"method": "mtp", "num_speculative_tokens": K},
        dtype="float64",
        max_model_len=256,
        max_num_seqs=4,
        block_size=BLOCK,
        **options,
    )
    first_rows: list[int] = []
    verify, seen = llm.llm_engine.model_runner.verify, set()

    def verified(batch: Any, *args: Any) -> Any:
        for request, span in zip(batch.requests, batch.spans, strict=True):
            if request.request_id not in seen:
                first_rows.append(span.start)
            seen.add(request.request_id)
        return verify(batch, *args)

    llm.llm_engine.model_runner.verify = verified  # type: ignore[method-assign]
    with served_to(llm, checkpoint) as (_, http):
        yield Turns(llm, http, first_rows)


@pytest.fixture(scope="module")
def warm(guessing_dir: Path) -> Iterator[Turns]:
    with turns(guessing_dir) as server:
        yield server


@pytest.fixture(scope="module")
def cold(guessing_dir: Path) -> Iterator[Turns]:
    with turns(guessing_dir, enable_prefix_caching=False) as server:
        yield server


def assert_alike(said: Said, alone: Said) -> None:
    """Nobody can tell from an answer that something was reused, nor from its drafts."""
    told = said.num_prompt_tokens, said.token_ids, said.text
    assert told == (alone.num_prompt_tokens, alone.token_ids, alone.text)
    assert said.steps == alone.steps


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


def prompt_ids(server: Turns, chat: Any) -> list[int]:
    return server.llm.render_chat(chat)["prompt_token_ids"]


def opening(server: Turns, offset: int) -> list[dict[str, str]]:
    """A chat whose prompt is so many tokens longer than whole blocks, or shorter."""
    for count in range(1, 40):
        chat = [
            {"role": "system", "content": "answer in short"},
            {"role": "user", "content": "name" + " the" * count},
        ]
        if (len(prompt_ids(server, chat)) - offset) % BLOCK == 0:
            return chat
    raise AssertionError("no text is of that length")


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_chat_that_grows_and_comes_again(warm: Turns, cold: Turns, offset: int, k: int) -> None:
    chat = opening(warm, offset)
    options = {"num_speculative_tokens": k, "max_tokens": 20}
    # What other cases have left is not for this one.
    salt = {"cache_salt": f"{offset} {k}"}
    first = warm.ask("chat/completions", messages=chat, **options, **salt)
    assert_alike(first, cold.ask("chat/completions", messages=chat, **options))
    assert (first.num_prompt_tokens - offset) % BLOCK == first.num_cached_tokens == 0
    grown = [
        *chat,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and then"},
    ]
    second = warm.ask("chat/completions", messages=grown, stream=True, **options, **salt)
    assert_alike(second, cold.ask("chat/completions", messages=grown, stream=True, **options))
    # The last token of an answer has not run.
    has_run = [*prompt_ids(warm, chat), *first.token_ids[:-1]]
    common = num_common(has_run, prompt_ids(warm, grown))
    assert second.num_cached_tokens == whole_blocks(common)
    assert common > first.num_prompt_tokens - BLOCK
    again = warm.ask("chat/completions", messages=chat, **options, **salt)
    assert_alike(again, first)
    assert again.num_cached_tokens == whole_blocks(first.num_prompt_tokens - 1)


def boundaries_in_accepted_runs(said: Said) -> list[int]:
    """Where the last row of a block was that of a draft, which was kept."""
    found, last = [], said.num_prompt_tokens - 1
    for step in said.steps:
        num_accepted = sum(one.startswith("accepted") for one in step["token_sources"])
        found += [b for b in range(last + 2, last + 2 + num_accepted) if b % BLOCK == 0]
        last += len(step["token_ids"])
    return found


@pytest.mark.parametrize("k", [1, K])
def test_blocks_that_accepted_drafts_completed(warm: Turns, cold: Turns, k: int) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(5, 4096) for _ in range(21)]
    options = {"num_speculative_tokens": k, "cache_salt": f"drafts {k}"}
    first = warm.ask("completions", prompt=prompt, max_tokens=48, **options)
    whole = prompt + first.token_ids
    crossed = boundaries_in_accepted_runs(first)
    assert len(crossed) >= 2
    for length in (boundary + i for boundary in crossed for i in (-1, 0, 1)):
        asked = {"prompt": whole[:length], "max_tokens": 6, "num_speculative_tokens": k}
        said = warm.ask("completions", **asked, cache_salt=options["cache_salt"])
        assert said.num_cached_tokens == whole_blocks(length - 1), length
        assert_alike(said, cold.ask("completions", **asked))
        # At temperature 0 it says again what it has said.
        assert said.token_ids == whole[length : length + 6], length
