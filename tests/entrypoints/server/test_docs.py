"""docs/server.md names every field, limit and metric, and none that is not there."""

import re
from pathlib import Path

from outrider.entrypoints.server import limits
from outrider.entrypoints.server.chat_protocol import ChatBody
from outrider.entrypoints.server.protocol import CompletionBody
from tests.entrypoints.server.test_metrics import TYPES

DOCS = (Path(__file__).parents[3] / "docs/server.md").read_text(encoding="utf-8")


def test_every_field_is_named() -> None:
    fields = DOCS.partition("## Fields of a request")[2].partition("Any other field")[0]
    named = {name.partition(".")[0] for name in re.findall(r"`([a-z_.]+)`", fields)}
    answers = {"generation_config", "spec_decode_stats"}
    assert named - answers == {*CompletionBody.model_fields, *ChatBody.model_fields}


def test_every_limit_is_named() -> None:
    table = DOCS.partition("| at most | |")[2].partition("## Its end")[0]
    numbers = {int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", table)}
    told = {
        value
        for name, value in vars(limits).items()
        if name.startswith("MAX_") and name not in ("MAX_COUNT", "MAX_NAME_LENGTH")
        if not name.startswith("MAX_METADATA")
    }
    assert told <= numbers


def test_every_metric_is_named() -> None:
    table = DOCS.partition("| metric | counts |")[2].partition("Mean acceptance")[0]
    table = table.replace("`..._per_pos", "`vllm:spec_decode_num_accepted_tokens_per_pos")
    named = {name.removesuffix("_total") for name in re.findall(r"`(vllm:[a-z0-9_]+)", table)}
    assert named == set(TYPES)
