"""The bundled tokenizer: byte-level BPE of 4,096 entries, trained on the model's own corpus.

Runs once, before the model is trained: `python -m outrider.training.tokenizer OUTPUT_DIR`. The same
documents give the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.errors import OutriderError, error_line
from outrider.training.corpus import END_OF_TEXT, collect_documents

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

VOCAB_SIZE = 4096
# Ids 0, 1, ... in this order.
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
# Marks that a reader of the output must see: they have ids of their own but survive
# `skip_special_tokens`.
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

# What BPE may not merge across. A line break takes the indentation after it; a word takes one space
# before it; digits stand alone; a punctuation mark merges with nothing but its own repetitions, so
# that token borders fall on the borders of Python's and JSON's grammar.
_SPLIT_PATTERN = r"(?:\r?\n)+[ \t]*| ?\p{L}+|\d| ?(?:([^\s\p{L}\d])\1*)|[ \t]+|\s"

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- 'Write a call as\\n<tool_call>\\n<function=NAME>\\n' }}
    {{- '<parameter=NAME>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {{- '\\n' if not loop.first else '\\n\\n' if message.content else '' }}
            {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- if call.arguments is string %}
                {{- call.arguments + '\\n' }}
            {%- else %}
                {%- for name, value in (call.arguments or {}) | items %}
                    {{- '<parameter=' + name + '>\\n' }}
                    {{- value if value is string else value | tojson }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
            {%- endif %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user\\n' }}
        {%- endif %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined %}
        {{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains the byte-level BPE; its 256 byte entries leave no text that it cannot encode."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(token, special=True) for token in (*SPECIAL_TOKENS, *MARKER_TOKENS)
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_plain_markers(tokenizer)


def _with_plain_markers(tokenizer: Tokenizer) -> Tokenizer:
    # The trainer makes every token of its list special, whatever the AddedToken says.
    state = json.loads(tokenizer.to_str())
    for added_token in state["added_tokens"]:
        added_token["special"] = added_token["content"] not in MARKER_TOKENS
    return Tokenizer.from_str(json.dumps(state))


def tokenizer_config(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """Returns what `tokenizer_config.json` holds, as transformers reads it."""
    decoder = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in (*SPECIAL_TOKENS, *MARKER_TOKENS)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what `generation_config.json` holds: end of document and end of turn both stop."""
    end_of_text, end_of_turn = (
        tokenizer.token_to_id(token) for token in (END_OF_TEXT, "<|im_end|>")
    )
    return {
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, end_of_turn],
        "pad_token_id": end_of_text,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int = 4096) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not by its own `save`, whose errors are not the system's.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    for name, content in (
        ("tokenizer_config.json", tokenizer_config(tokenizer, max_length)),
        ("generation_config.json", generation_config(tokenizer)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains on the standard library and writes the files; returns the exit code.

    Args:
        arguments: of the command line; None is those of the process.
    """
    parser = argparse.ArgumentParser(
        description="Trains on the standard library and writes the files."
    )
    parser.add_argument("output_dir", type=Path)
    given = parser.parse_args(arguments)
    try:
        tokenizer = train_tokenizer(document.text for document in collect_documents())
        save_tokenizer(tokenizer, given.output_dir)
    except (OSError, OutriderError) as error:
        sys.stderr.write(error_line(error, given.output_dir))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
