"""A client that has many requests open at once, and closes some of its connections."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.entrypoints.server.soak_visits import Visit

# What drafting brought, as answers and, with `_total`, the counters call it.
COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
PER_POSITION = "num_accepted_tokens_per_pos"
_TIMEOUT_S = 120


# Both are of few bytes, since thousands are held while the memory of the process is watched.
@dataclass(slots=True)
class Choice:
    """What came of one choice.

    Attributes:
        text: of all pieces.
        token_ids: of all pieces.
        finish_reason: why it ended.
        stop_reason: the id or the text that ended it.
    """

    text: str = ""
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, told: dict[str, Any]) -> None:
        """Takes up a choice of an answer or of a chunk."""
        message = told.get("message") or told.get("delta")
        self.text += (told["text"] if message is None else message.get("content")) or ""
        self.token_ids.extend(told.get("token_ids") or ())
        if told["finish_reason"] is not None:
            assert self.finish_reason is None, "a choice ends once"
            self.finish_reason, self.stop_reason = told["finish_reason"], told["stop_reason"]


@dataclass(slots=True)
class Answer:
    """What came of a request.

    Attributes:
        status: of HTTP; None where the client left before it.
        has_left: whether the client closed the connection before the end.
        choices: by their numbers.
        num_prompt_tokens: as usage tells them.
        num_completion_tokens: as usage tells them.
        drafting: the figures `COUNTED`, then those of `PER_POSITION`; empty where none were told.
        wrong_field: of which an error tells.
    """

    status: int | None = None
    has_left: bool = False
    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    drafting: array[int] = field(default_factory=lambda: array("q"))
    wrong_field: str | None = None

    def add(self, told: dict[str, Any]) -> None:
        """Takes up a whole answer or a chunk."""
        if "error" in told:
            self.wrong_field = told["error"]["param"]
            return
        for choice in told["choices"]:
            self.choices[choice["index"]].add(choice)
        if usage := told.get("usage"):
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_completion_tokens = usage["completion_tokens"]
        if stats := told.get("spec_decode_stats"):
            self.drafting.extend([*(stats[name] for name in COUNTED), *stats[PER_POSITION]])


def ask_all(url: str, visits: Sequence[Visit], num_at_once: int) -> list[Answer]:
    """Sends requests, so many at once; the answers are in their order."""
    return asyncio.run(_ask_all(url, visits, num_at_once))


async def _ask_all(url: str, visits: Sequence[Visit], num_at_once: int) -> list[Answer]:
    answers = [Answer() for _ in visits]
    waiting = iter(zip(visits, answers, strict=True))
    limits = httpx2.Limits(max_connections=num_at_once)
    async with httpx2.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as http:
        await asyncio.gather(*(_ask_in_turn(http, waiting) for _ in range(num_at_once)))
    return answers


async def _ask_in_turn(http: httpx2.AsyncClient, waiting: Iterator[tuple[Visit, Answer]]) -> None:
    for visit, answer in waiting:
        after_s = None if visit.leaving is None else visit.leaving.after_s
        try:
            async with asyncio.timeout(after_s):
                await _ask(http, visit, answer)
        except TimeoutError:
            answer.has_left = True


async def _ask(http: httpx2.AsyncClient, visit: Visit, answer: Answer) -> None:
    """One request; to leave the block early closes its connection."""
    after_chunks = None if visit.leaving is None else visit.leaving.after_chunks
    async with http.stream("POST", visit.path, json=visit.body()) as response:
        answer.status = response.status_code
        if not visit.is_streamed or answer.status != 200:
            answer.add(json.loads(await response.aread()))
            return
        num_chunks = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line:
                answer.add(json.loads(line.removeprefix("data: ")))
                num_chunks += 1
            if num_chunks == after_chunks:
                answer.has_left = True
                return
        raise AssertionError("a stream without its last line")
