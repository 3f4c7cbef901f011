"""The schema of the bodies, for /openapi.json: they are read by hand, and FastAPI sees none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI
    from pydantic import BaseModel

_REF = "#/components/schemas/{model}"


def describe_body(body: type[BaseModel]) -> dict[str, Any]:
    """What the schema says of an address that takes this body."""
    schema = {"$ref": _REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schema(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Puts the schemas of the bodies, and of an error, beside what FastAPI knows."""
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_REF
    )
    make = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make()
        schema.setdefault("components", {})["schemas"] = definitions["$defs"]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
