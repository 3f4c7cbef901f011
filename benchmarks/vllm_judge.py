"""Our own float32 engine as the judge of what vLLM wrote.

At each token of a text it says what it would have written itself after the same tokens before it
(teacher forcing), and so how far below its own choice the token lies.
"""

import json
from collections.abc import Sequence
from typing import Any

import xgrammar

from benchmarks.vllm_settings import MAX_MODEL_LEN, prompts_of
from outrider.entrypoints.llm import LLM
from outrider.errors import OutriderError
from outrider.sampling_params import SamplingParams

# Tokens a grammar may forbid before the likeliest that it allows.
_NUM_RANKED = 1000

# What an object of the JSON suite may hold; short, so that drafts are often cut by the grammar.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


class ForbiddenTokenError(OutriderError):
    """A text that its schema does not allow."""


class Judge:
    """Scores texts; see the module."""

    def __init__(self) -> None:
        self.llm = LLM(dtype="float32", max_model_len=MAX_MODEL_LEN, max_logprobs=_NUM_RANKED)

    def prompts(self, suites: Sequence[str], num_prompts: int) -> list[list[int]]:
        """Token ids of prompts of each suite, and one of all of them that is many blocks long."""
        found = prompts_of(self.llm, suites, num_prompts)
        together = [token for prompt in found for token in prompt]
        return [*found, together[: MAX_MODEL_LEN // 2]]

    def gaps(
        self,
        prompts: Sequence[list[int]],
        texts: Sequence[list[int]],
        schema: dict[str, Any] | None = None,
    ) -> list[list[float]]:
        """How far each token of each text lies below the judge's own choice, in nats.

        Args:
            prompts: token ids.
            texts: token ids of what follows each.
            schema: that the texts were held to; what it forbids is no choice.

        Raises:
            ForbiddenTokenError: a text is not of the schema.
        """
        scored = self.llm.generate(
            [prompt + text for prompt, text in zip(prompts, texts, strict=True)],
            SamplingParams(
                temperature=0.0, max_tokens=1, prompt_logprobs=1 if schema is None else _NUM_RANKED
            ),
        )
        compiled = None if schema is None else self._compile(schema)
        found = []
        for prompt, text, output in zip(prompts, texts, scored, strict=True):
            assert output.prompt_logprobs is not None, "they were asked for"
            grammar = None if compiled is None else _Grammar(compiled, self._vocab_size)
            places = []
            for token, entry in zip(text, output.prompt_logprobs[len(prompt) :], strict=True):
                assert entry is not None, "only the first token of a prompt has none"
                choices = {id_: one.logprob for id_, one in entry.items()}
                if grammar is not None:
                    choices = grammar.allowed(choices, token)
                places.append(max(choices.values()) - entry[token].logprob)
            found.append(places)
        return found

    @property
    def _vocab_size(self) -> int:
        return self.llm.llm_engine.model.config.vocab_size

    def _compile(self, schema: dict[str, Any]) -> xgrammar.CompiledGrammar:
        """As vLLM compiles it; our own engine reads some schemas more strictly."""
        tokenizer = self.llm.get_tokenizer()
        info = xgrammar.TokenizerInfo(
            [tokenizer.token_bytes(index) for index in range(self._vocab_size)],
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(self.llm.llm_engine.eos_token_ids),
        )
        return xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))


class _Grammar:
    """The way of one text through a grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def allowed(self, choices: dict[int, float], token: int) -> dict[int, float]:
        """What may stand in a token's place; the next call is for the token after it."""
        if self._matcher.is_terminated():
            return choices
        self._matcher.fill_next_token_bitmask(self._bitmask)
        words = self._bitmask[0].tolist()
        kept = {id_: one for id_, one in choices.items() if words[id_ // 32] >> (id_ % 32) & 1}
        if not self._matcher.accept_token(token):
            raise ForbiddenTokenError(f"a text holds the token {token} where its schema forbids it")
        return kept
