"""Texts drawn at random from grammars are what was asked for, by readers that are not ours."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.structural_tag import MAX_WHITESPACE
from outrider.structured_outputs import StructuredOutputsParams
from outrider.tokenizer import Tokenizer
from tests.grammar.random_text import random_text

NODE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["v", "next"],
}
SCHEMAS: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            "kind": {"enum": ['a"b', "é", 1, None, True, [1, {"x": "y"}]]},
        },
        "required": ["name", "kind"],
    },
    "additional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string", "maxLength": 3},
    },
    "any object": {"type": "object"},
    "keys": {
        "type": "object",
        "properties": {'a"b\n': {"type": "null"}, "é": {"type": "null"}},
        "required": ['a"b\n', "é"],
    },
    "integer": {"type": "integer", "minimum": -3, "maximum": 1200},
    "exclusive": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 17},
    "number": {"type": "number", "minimum": 0.5, "maximum": 3.25},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "types": {"type": ["string", "null", "integer"], "minLength": 2, "maxLength": 9, "minimum": 4},
    "pattern": {"type": "string", "pattern": "^[a-z]{2}\\d+$"},
    "any characters": {"type": "string", "pattern": "^.[^a]\\S$"},
    "quotes": {"type": "string", "pattern": '^["\\\\]b\\/[ -~]{2}\\n$'},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"const": "x"}},
    "one of": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "node": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
}


def texts(
    compiler: GrammarCompiler, tokenizer: Tokenizer, params: StructuredOutputsParams, count: int
) -> list[str]:
    random_numbers = random.Random(3)
    found = [random_text(compiler, tokenizer, params, random_numbers) for _ in range(count)]
    whole = [text for text in found if text is not None]
    assert len(whole) >= count // 2, "nearly all of them come to an end"
    return whole


@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_json(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], is_compact: bool
) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.FormatChecker(["ipv4", "uuid"])
    )
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=is_compact)
    for text in texts(compiler, tokenizer, params, 12):
        validator.validate(json.loads(text))
        outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        longest = max((len(run) for run in re.findall(r"\s+", outside)), default=0)
        # Two places meet in an empty list.
        assert longest <= (0 if is_compact else 2 * MAX_WHITESPACE)


REGEXES = [
    "[a-z]+",
    "^(a|b)$",
    "a|bc",
    r"\d{3}-\d{4}",
    "a*?b",
    "[^x]y",
    ".{0,3}z",
    "a{2,}",
    r"[\d-]+",
    "é+",
    "(?P<n>a)b",
    r"[^\n\s]",
    r"\x41é",
    "[ -~]{3}",
    "[]a]b",
    "[^]a]b",
    r"\W\D\S",
    r"[^\w]",
    r"[^\W]",
    r"(ab|c){2}",
    "[\u4e00-\u9fff]{2}",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_regex(compiler: GrammarCompiler, tokenizer: Tokenizer, regex: str) -> None:
    params = StructuredOutputsParams(regex=regex)
    for text in texts(compiler, tokenizer, params, 8):
        assert re.fullmatch(regex, text)
        assert re.fullmatch(regex, text, re.ASCII)


def test_choice_and_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choices = ['yes "x"\n', "no", "nobody"]
    params = StructuredOutputsParams(choice=choices)
    assert set(texts(compiler, tokenizer, params, 40)) == set(choices)
    params = StructuredOutputsParams(grammar='root ::= "a" root | [b-c]')
    assert all(re.fullmatch("a*[bc]", text) for text in texts(compiler, tokenizer, params, 10))
    params = StructuredOutputsParams(json_object=True)
    assert all(type(json.loads(text)) is dict for text in texts(compiler, tokenizer, params, 10))


@pytest.mark.parametrize(
    ("reasoning", "pattern"),
    [("open", "{t}</think>\n{{0,2}}x+"), ("optional", "(<think>{t}</think>\n{{0,2}})?x+")],
)
def test_thoughts(
    compiler: GrammarCompiler, tokenizer: Tokenizer, reasoning: Any, pattern: str
) -> None:
    """They may say whatever they want but where they end, and end nowhere else."""
    expected = re.compile(pattern.format(t="((?!</think>).)*?"), re.DOTALL)
    params = StructuredOutputsParams(regex="x+", reasoning=reasoning)
    path = compiler.path(params)
    for text in ("a<b</thi</think>\n\nxx", "</think>x", "a</think></think>x", "x", "</think>"):
        written = f"<think>{text}" if reasoning == "optional" and "<" in text else text
        token_ids = tokenizer.encode(written, add_special_tokens=False)
        is_allowed = path.num_allowed([], 0, token_ids) == len(token_ids)
        allowed = ids_of_end(path, token_ids, tokenizer) if is_allowed else False
        assert allowed == bool(expected.fullmatch(written)), written


def ids_of_end(path: Any, token_ids: list[int], tokenizer: Tokenizer) -> bool:
    """Whether the text may end here."""
    from tests.grammar.toy_grammar import ids_of

    allowed = ids_of(path.allowed_after(token_ids, 0)) or set()
    return bool(allowed.intersection(tokenizer.eos_token_ids))
