"""The fields of a body that say what the text of an output must be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider.structured_outputs import MAX_GRAMMAR_LENGTH

_Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
_MAX_CHOICES = 1024


class _Part(BaseModel):
    """A part of a body."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class JsonSchemaFormat(_Part):
    """A JSON schema, as OpenAI wraps it; the output is held to it with strict false too."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    # A model of pydantic has methods called schema and json.
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Part):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Part):
    """vLLM's way to say what the text must be."""

    json_: Annotated[dict[str, Any] | _Text | None, Field(alias="json")] = None
    regex: _Text | None = None
    choice: Annotated[list[_Text], Field(min_length=1, max_length=_MAX_CHOICES)] | None = None
    grammar: _Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
