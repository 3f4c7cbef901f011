"""Prompts of every form that users write them in, turned into token ids."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError, shown

if TYPE_CHECKING:
    from outrider.tokenizer import Tokenizer

    Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt, ready for the engine.

    Attributes:
        token_ids: what is run.
        text: what they were encoded from, or None where ids were given.
        name: how an error names it, such as "prompts[3]"; empty for a prompt that stands alone.
        cache_salt: only prompts with the same one share what was run of them.
    """

    token_ids: list[int]
    text: str | None = None
    name: str = ""
    cache_salt: str | None = None


class PromptEncoder:
    """Encodes prompts with the tokenizer of a checkpoint.

    A prompt is a text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; the
    last two may have a `cache_salt`, a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, prompts: Prompt | Sequence[Prompt]) -> list[EncodedPrompt]:
        """One prompt or several; errors name the index of one that was not given alone."""
        if _is_one(prompts):
            return [self.encode_one(prompts)]
        if not isinstance(prompts, Sequence):
            raise RequestError(f"prompts must be a text or a list of prompts, got {shown(prompts)}")
        return [self.encode_one(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]

    def encode_one(self, prompt: object, name: str = "") -> EncodedPrompt:
        """One prompt.

        Args:
            prompt: of any form.
            name: how an error names it; empty leaves it without.
        """
        try:
            text, token_ids = _text_and_ids(prompt)
            salt = _cache_salt(prompt)
            if token_ids is None:
                assert text is not None, "a prompt has a text or token ids"
                token_ids = self._tokenizer.encode(text)
        except RequestError as error:
            raise RequestError(f"{name}: {error}" if name else str(error)) from None
        return EncodedPrompt(token_ids, text, name, salt)


def _is_one(prompts: object) -> bool:
    """Whether this is one prompt: a text, an object, or a list of token ids."""
    if isinstance(prompts, str | Mapping):
        return True
    return (
        isinstance(prompts, Sequence)
        and len(prompts) > 0
        and all(isinstance(item, Integral) for item in prompts)
    )


def _text_and_ids(prompt: object) -> tuple[str | None, list[int] | None]:
    """Text and token ids of one prompt of any form; one of the two may be None."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return None, _token_ids("the prompt", prompt)
    if not isinstance(prompt, Mapping):
        raise RequestError(
            "a prompt must be a text, a list of token ids or an object with prompt or "
            f"prompt_token_ids, got {shown(prompt)}"
        )
    for key in prompt:
        if key not in _PROMPT_KEYS:
            near = difflib.get_close_matches(str(key), _PROMPT_KEYS, n=1, cutoff=0.0)[0]
            raise RequestError(f'unknown key {shown(key)} of a prompt; the nearest is "{near}"')
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise RequestError(f"prompt or prompt_token_ids is missing, got {shown(dict(prompt))}")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt must be a text, got {shown(text)}")
    return text, None if token_ids is None else _token_ids("prompt_token_ids", token_ids)


def _cache_salt(prompt: object) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt must be a text, and not an empty one, got {shown(salt)}")
    return salt


def _token_ids(name: str, value: object) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise RequestError(f"{name} must be a list of token ids, got {shown(value)}")
    for index, token_id in enumerate(value):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise RequestError(f"{name}[{index}] must be a token id, got {shown(token_id)}")
    return [int(token_id) for token_id in value]
