"""/openapi.json: bodies are read, and answers written, by hand, so FastAPI knows of neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from outrider.entrypoints.server import answer_bodies as answers
from outrider.entrypoints.server.gate import PUBLIC_PATHS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from pydantic import BaseModel

_REF = "#/components/schemas/{model}"
# By address, what it answers with 200; figures for Prometheus are a text.
_ANSWERS: dict[str, Any] = {
    "/v1/completions": answers.Completion,
    "/v1/chat/completions": answers.ChatCompletion,
    "/tokenize": answers.Tokenization,
    "/detokenize": answers.Detokenization,
    "/v1/models": answers.ModelList,
    "/v1/models/{name}": answers.ModelCard,
    "/health": answers.Health,
    "/version": answers.Version,
    "/metrics": str,
}
# By address, the events of what it streams.
_CHUNKS: dict[str, Any] = {
    "/v1/completions": answers.CompletionChunk,
    "/v1/chat/completions": answers.ChatCompletionChunk,
}
_ERRORS = {
    400: "a field is wrong, which `param` names",
    401: "no valid API key",
    403: "the Host header names none of the hosts of this server",
    404: "the model is not served here",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "the body is no JSON in UTF-8",
    429: "too many requests run and wait",
    500: "the server failed",
    503: "the engine has stopped, or the server is about to",
}
_OF_BODIES = (400, 404, 408, 413, 415)
_OF_GENERATION = (429, 500, 503)


def add_schema(app: FastAPI, bodies: Mapping[str, type[BaseModel]], wants_key: bool) -> None:
    """Says in the schema what bodies and answers hold.

    Args:
        app: with all its addresses.
        bodies: by address, what it takes.
        wants_key: whether a client needs the API key.
    """
    named = [*bodies.values(), *_ANSWERS.values(), *_CHUNKS.values(), answers.ErrorAnswer]
    adapters = [(one, "validation", TypeAdapter(one)) for one in named if one is not str]
    _, definitions = TypeAdapter.json_schemas(adapters, ref_template=_REF)  # type: ignore[arg-type]
    make = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make()
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                if path in bodies:
                    content = {"application/json": {"schema": _ref(bodies[path])}}
                    operation["requestBody"] = {"required": True, "content": content}
                operation["responses"] = _responses(path, path in bodies, wants_key)
                if wants_key and path not in PUBLIC_PATHS:
                    operation["security"] = [{"bearer": []}]
        schema["components"] = {"schemas": definitions["$defs"]}
        if wants_key:
            scheme = {"type": "http", "scheme": "bearer"}
            schema["components"]["securitySchemes"] = {"bearer": scheme}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _responses(path: str, takes_body: bool, wants_key: bool) -> dict[str, Any]:
    """What an address may answer, by status."""
    answer = _ANSWERS[path]
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if answer is str:
        content = {"text/plain": {"schema": {"type": "string"}}}
    if path in _CHUNKS:
        content["text/event-stream"] = {"itemSchema": _event(_CHUNKS[path])}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    statuses = [403, *_OF_BODIES] if takes_body else [403]
    statuses += [401] * (wants_key and path not in PUBLIC_PATHS)
    statuses += _OF_GENERATION if path in _CHUNKS else ()
    statuses += {"/health": [503], "/v1/models/{name}": [404]}.get(path, [])
    error = {"application/json": {"schema": _ref(answers.ErrorAnswer)}}
    for status in sorted(statuses):
        responses[str(status)] = {"description": _ERRORS[status], "content": error}
    if path in _CHUNKS:
        seconds = {"description": "Seconds to wait", "schema": {"type": "integer"}}
        responses["429"]["headers"] = {"Retry-After": seconds}
    return responses


def _event(chunk: Any) -> dict[str, Any]:
    """A server-sent event, in the words of OpenAPI 3.2 and of FastAPI."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(chunk), _ref(answers.ErrorAnswer)]},
    }
    # A stream that failed ends with the error instead.
    last = {"const": "[DONE]"}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [last, data]}},
        "required": ["data"],
    }


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": _REF.format(model=kind.__name__)}
