"""Random requests of every kind, as bodies for the server and as parameters for a run alone."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

import jsonschema

Fields = dict[str, Any]

MAX_K = 3
_TEXT = """
    return self value for in range print the list of names def class import error is not None
    name = size + 1 while key dict text file open as e if else True False index data
"""
_WORDS = _TEXT.split()
_REGEXES = ("[0-9]{2,4}", "(yes|no)( please)?", "[a-c]{1,6}x", '"[a-z]{1,8}"', "-?[0-9]\\.[0-9]")


@dataclass(frozen=True)
class Leaving:
    """When a client closes its connection.

    Attributes:
        after_s: seconds after it has sent its request; None is not by the clock.
        after_chunks: pieces of a stream after which it leaves; None is not by their number.
    """

    after_s: float | None = None
    after_chunks: int | None = None


@dataclass(frozen=True)
class Visit:
    """One request.

    Attributes:
        prompt: text, token ids, several of these, or the messages of a chat.
        is_chat: whether it is the latter.
        fields: what a body and `SamplingParams` have under one name.
        transport: what only a body has.
        wanted: what the text has to be, as `StructuredOutputsParams` has it.
        leaving: None stays to the end.
        wrong_field: the field of which a 400 must tell; None is a sound request.
    """

    prompt: Any
    is_chat: bool
    fields: Fields
    transport: Fields
    wanted: Fields | None = None
    leaving: Leaving | None = None
    wrong_field: str | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def is_streamed(self) -> bool:
        return bool(self.transport.get("stream"))

    @property
    def is_reproducible(self) -> bool:
        """Whether its text depends on nothing but itself."""
        coupled = self.fields.get("rejection_sample_method") == "coupled"
        return coupled or self.fields["temperature"] == 0

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.fields.get("n", 1)

    @property
    def prompts(self) -> list[Any]:
        """Each prompt of a completion; a chat is one."""
        is_several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if is_several and not self.is_chat else [self.prompt]

    def body(self) -> Fields:
        """What is sent."""
        asked: Fields = {}
        if self.wanted is not None and "json" in self.wanted:
            schema = {"name": "x", "schema": self.wanted["json"]}
            asked["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.wanted is not None:
            asked["structured_outputs"] = self.wanted
        key = "messages" if self.is_chat else "prompt"
        return {key: self.prompt, **self.fields, **self.transport, **asked}

    def check_text(self, text: str) -> None:
        """A text that has come to its end is what was wanted."""
        if self.wanted is None:
            return
        ((kind, value),) = self.wanted.items()
        if kind == "json":
            jsonschema.validate(json.loads(text), value)
        elif kind == "regex":
            assert re.fullmatch(value, text), (value, text)
        else:
            assert text in value, (value, text)


@dataclass
class VisitMaker:
    """Makes requests; the same ones from the same seed.

    Attributes:
        seed: of all choices.
        vocab_size: prompts of token ids hold ids below it.
        leaving_share: of the requests, how many are given up.
    """

    seed: int
    vocab_size: int
    leaving_share: float
    _rng: random.Random = field(init=False)
    _beginnings: list[list[int]] = field(init=False)
    _systems: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        # Of some lengths, so that what requests have in common ends anywhere in a block.
        self._beginnings = [self._ids(length) for length in (15, 16, 17, 40, 71, 100)]
        self._systems = [self._text(length) for length in (4, 12, 30)]

    def visits(self, count: int) -> list[Visit]:
        """So many requests."""
        return [self._visit(index) for index in range(count)]

    def _visit(self, index: int) -> Visit:
        rng = self._rng
        is_chat = rng.random() < 0.35
        wanted = self._wanted() if rng.random() < 0.3 else None
        fields = self._fields(index, is_structured=wanted is not None)
        if rng.random() < 0.08 and fields.get("rejection_sample_method") is None:
            fields["n"] = rng.choice([2, 3])
        is_streamed = rng.random() < 0.6
        transport: Fields = {"return_token_ids": True, "return_spec_decode_stats": True}
        if is_streamed:
            transport |= {"stream": True, "stream_options": {"include_usage": True}}
        visit = Visit(self._prompt(is_chat), is_chat, fields, transport, wanted)
        if rng.random() < 0.03:
            return self._spoiled(visit)
        leaving = self._leaving(is_streamed) if rng.random() < self.leaving_share else None
        return Visit(visit.prompt, is_chat, fields, transport, wanted, leaving)

    def _prompt(self, is_chat: bool) -> Any:
        rng = self._rng
        if is_chat:
            messages = [{"role": "system", "content": rng.choice(self._systems)}]
            for _ in range(rng.choice([0, 0, 1])):
                messages.append({"role": "user", "content": rng.choice(_WORDS)})
                messages.append({"role": "assistant", "content": rng.choice(_WORDS)})
            return [*messages, {"role": "user", "content": self._text(rng.choice([1, 4, 15]))}]
        kind = rng.random()
        if kind < 0.3:
            return self._text(rng.choice([1, 5, 20, 60]))
        begins = [*rng.choice(self._beginnings), *self._ids(rng.choice([0, 1, 3, 20]))]
        return [begins, self._ids(rng.choice([1, 9]))] if kind < 0.36 else begins

    def _fields(self, index: int, *, is_structured: bool) -> Fields:
        rng = self._rng
        fields: Fields = {"max_tokens": rng.choice([1, 2, 5, 12, 25, 50]), "temperature": 0.0}
        kind = rng.random()
        if kind < 0.2:
            coupled = {"rejection_sample_method": "coupled", "seed": index}
            fields |= {"temperature": rng.choice([0.5, 1.0]), **coupled}
        elif kind < 0.3:
            fields |= {"temperature": 1.0}
        if rng.random() < 0.4:
            fields["num_speculative_tokens"] = rng.choice([0, 1, 2])
        if not is_structured and rng.random() < 0.5:
            fields["ignore_eos"] = True
        if is_structured or rng.random() < 0.5:
            return fields
        extra: Fields = {
            "stop": rng.sample(["e", "in", "re", "or", "\n"], 2),
            "include_stop_str_in_output": True,
            "stop_token_ids": rng.sample(range(5, self.vocab_size), 128),
            "presence_penalty": rng.choice([-1.0, 1.0]),
            "repetition_penalty": rng.choice([0.8, 1.4]),
            "min_tokens": rng.randint(1, fields["max_tokens"]),
            "bad_words": rng.sample(_WORDS, 3),
            "top_k": rng.choice([1, 20]),
            "top_p": 0.9,
        }
        for name in rng.sample(sorted(extra), rng.choice([1, 1, 3])):
            fields[name] = extra[name]
        return fields

    def _wanted(self) -> Fields:
        rng = self._rng
        kind = rng.random()
        if kind < 0.6:
            return {"json": self._schema(depth=2)}
        if kind < 0.8:
            return {"regex": rng.choice(_REGEXES)}
        return {"choice": [self._text(rng.randint(1, 3)) for _ in range(3)]}

    def _schema(self, depth: int) -> Fields:
        rng = self._rng
        low = rng.randint(-20, 90)
        leaves: list[Fields] = [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
            {"type": "string", "maxLength": rng.randint(1, 5)},
            {"enum": [rng.choice(_WORDS), rng.randint(0, 9), None]},
            {"const": rng.choice(_WORDS)},
        ]
        if not depth or rng.random() < 0.2:
            return rng.choice(leaves)
        if rng.random() < 0.25:
            return {"type": "array", "items": self._schema(depth - 1), "maxItems": 2}
        names = rng.sample("abcdef", rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: self._schema(depth - 1) for name in names},
            "required": names[: rng.randint(1, len(names))],
            "additionalProperties": False,
        }

    def _spoiled(self, visit: Visit) -> Visit:
        """A request of which one field is wrong."""
        name, value = self._rng.choice(
            [
                ("temperature", -1),
                ("max_tokens", "5"),
                ("num_speculative_tokens", MAX_K + 1),
                ("top_p", 2),
                ("stop[0]", ""),
                ("use_beam_search", True),
                ("logit_bias", {str(self.vocab_size): 1}),
                ("structured_outputs.regex", "(?=a)"),
            ]
        )
        fields, wanted = dict(visit.fields), visit.wanted
        if name == "structured_outputs.regex":
            wanted = {"regex": value}
        elif name == "stop[0]":
            fields["stop"] = [value]
        else:
            fields[name] = value
        return Visit(visit.prompt, visit.is_chat, fields, visit.transport, wanted, None, name)

    def _leaving(self, is_streamed: bool) -> Leaving:
        if is_streamed and self._rng.random() < 0.75:
            return Leaving(after_chunks=self._rng.randint(1, 6))
        return Leaving(after_s=self._rng.choice([0.0, 0.01, 0.1, 0.5]) * self._rng.random())

    def _ids(self, count: int) -> list[int]:
        # From 5 on, for those below are special.
        return [self._rng.randrange(5, self.vocab_size) for _ in range(count)]

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=num_words))
