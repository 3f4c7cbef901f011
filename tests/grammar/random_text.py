"""Texts that a grammar allows, drawn at random: what a model without any sense would write."""

import random

from outrider.grammar.compiler import GrammarCompiler
from outrider.structured_outputs import StructuredOutputsParams
from outrider.tokenizer import Tokenizer
from tests.grammar.toy_grammar import ids_of

_CLOSING = b'"}],'
_LONGEST = 150


def random_text(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    params: StructuredOutputsParams,
    random_numbers: random.Random,
    num_free_tokens: int = 12,
) -> str | None:
    """A whole text, None where it came to no end; after the free tokens it hurries to one."""
    path, token_ids = compiler.path(params), list[int]()
    for num_tokens in range(_LONGEST):
        allowed = ids_of(path.allowed_after(token_ids, num_tokens))
        assert allowed, "there is a way on from every place"
        ends = allowed.intersection(tokenizer.eos_token_ids)
        is_hurried = num_tokens >= num_free_tokens
        if ends and (is_hurried or random_numbers.random() < 0.3):
            return tokenizer.decode(token_ids)
        closing = [i for i in allowed - ends if tokenizer.token_bytes(i)[:1] in _CLOSING]
        choice = closing if is_hurried and any(closing) else sorted(allowed - ends)
        if not choice:
            return tokenizer.decode(token_ids)
        token_ids.append(random_numbers.choice(choice))
    return None
