"""From what a body asks of the output to its grammar: texts, calls of tools, or either."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.entrypoints.server.chat_protocol import ChatBody, NamedToolChoice
from outrider.entrypoints.server.errors import invalid
from outrider.entrypoints.server.qwen_markup import thoughts_after
from outrider.entrypoints.server.tool_grammar import call_tag, calls_format, chosen_calls_format
from outrider.errors import RequestError
from outrider.grammar.structural_tag import json_format, one_of, text_format
from outrider.structured_outputs import MAX_GRAMMAR_LENGTH, StructuredOutputsParams

if TYPE_CHECKING:
    from outrider.entrypoints.server.errors import ApiError
    from outrider.entrypoints.server.message_parser import MessageFormat
    from outrider.entrypoints.server.protocol import GenerationBody

_SCHEMA_FIELD = "response_format.json_schema.schema"


async def structured_outputs(
    body: GenerationBody, form: MessageFormat | None = None
) -> StructuredOutputsParams | None:
    """What the output of a request has to be; None where it may be anything.

    Args:
        body: of the request.
        form: how the output of a chat is read; None of a completion.

    Raises:
        ApiError: names the part that no output can be held to.
    """
    tools = body.tools if isinstance(body, ChatBody) else None
    if not (body.response_format or body.structured_outputs or tools):
        return None
    try:
        # A large schema takes its time, which is not the event loop's.
        return await asyncio.to_thread(_of_body, body, form)
    except RequestError as error:
        raise explained(error) from None


def _of_body(body: GenerationBody, form: MessageFormat | None) -> StructuredOutputsParams | None:
    wanted = _of_text(body)
    if isinstance(body, ChatBody) and form is not None:
        if form.tool_call_parser is not None:
            wanted = _with_calls(body, wanted, form.calls_are_held)
        if wanted is not None and form.reasoning_parser is not None:
            wanted = replace(wanted, reasoning=thoughts_after(form.prompt))
    return wanted


def holds_chosen_calls(body: ChatBody) -> bool:
    """Whether the output is free text in which a grammar holds what begins as a call to be one."""
    is_free = not body.requires_call and field_of(body) == "tools"
    return is_free and any(tool.function.strict is True for tool in body.told_tools)


def explained(error: RequestError, field: str = "structured_outputs") -> ApiError:
    """An error that begins with the place in the body where it lies.

    Args:
        error: of a grammar; of its beginning `structured_outputs` the field takes the place.
        field: of the body that asked for it.
    """
    message = str(error)
    if message.startswith("structured_outputs"):
        message = field + message.removeprefix("structured_outputs")
    return invalid(message.split(maxsplit=1)[0].rstrip(":"), message)


def field_of(body: GenerationBody) -> str:
    """The field by which a body that has a grammar asks for it."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    is_text = body.response_format is None or body.response_format.type == "text"
    return "tools" if is_text else "response_format"


def _of_text(body: GenerationBody) -> StructuredOutputsParams | None:
    wanted, given = body.response_format, body.structured_outputs
    if wanted is not None and wanted.type == "text":
        wanted = None
    if wanted is not None and given is not None:
        raise RequestError("structured_outputs does not go with response_format: give one of them")
    if given is not None:
        asked = given.model_dump(exclude={"disable_any_whitespace"}, exclude_none=True)
        if len(asked) != 1:
            raise RequestError(
                "structured_outputs needs exactly one of json, regex, choice, grammar and "
                f"json_object, got {len(asked)} of them"
            )
        return StructuredOutputsParams(
            json=given.json_,
            regex=given.regex,
            choice=given.choice,
            grammar=given.grammar,
            json_object=given.json_object,
            disable_any_whitespace=bool(given.disable_any_whitespace),
        )
    if wanted is None:
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.json_schema is None:
        raise RequestError(f"{_SCHEMA_FIELD} is missing")
    schema = wanted.json_schema.schema_
    try:
        params = StructuredOutputsParams(json=schema)
    except RequestError as error:
        message = str(error).replace("structured_outputs.json", _SCHEMA_FIELD)
        raise RequestError(message) from None
    json_format(schema, _SCHEMA_FIELD)
    return params


def _with_calls(
    body: ChatBody, wanted: StructuredOutputsParams | None, calls_are_held: bool
) -> StructuredOutputsParams | None:
    """Calls where they are required, and beside a text where the model may choose.

    Functions that are strict, and all that are required, are called by their schemas.
    """
    tools = list(enumerate(body.tools or []))
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        tools = [one for one in tools if one[1].function.name == choice.function.name]
    if not body.requires_call and wanted is None and not calls_are_held:
        return None
    tags, length = list[dict[str, Any]](), 0
    for index, tool in tools:
        tags.append(call_tag(tool.function, f"tools[{index}].function"))
        length += len(json.dumps(tags[-1], ensure_ascii=False))
        if length > MAX_GRAMMAR_LENGTH:
            raise RequestError(
                f"tools[{index}].function.parameters and those before it make a grammar of more "
                f"than {MAX_GRAMMAR_LENGTH:,} characters"
            )
    is_one = body.parallel_tool_calls is False or isinstance(choice, NamedToolChoice)
    if body.requires_call:
        return _tag(calls_format(tags, is_one=is_one))
    if wanted is not None:
        return _tag(one_of([text_format(wanted), calls_format(tags, is_one=is_one)]))
    return _tag(chosen_calls_format(tags, is_one=is_one))


def _tag(form: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=json.dumps(form, ensure_ascii=False))
