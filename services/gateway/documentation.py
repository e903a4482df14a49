"""OpenAPI of the routes: bodies that are read raw, shared error answers, the key. Used by `routes`."""

from __future__ import annotations

from typing import Any

from fastapi import Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, JsonValue

from shared.errors import Problem

KEY = Security(HTTPBearer(auto_error=False, description="One of ROLLART_API_KEYS"))
"""Shows the key in `/docs`; the check itself is `shared.service.require_key`."""

_MEANING = {
    401: "No bearer key, or a wrong one",
    404: "No such run, task, policy or trajectory",
    409: "Contradicts what exists",
    422: "A field is wrong: `fields` names each",
    503: "Broker or Redis is away: try again",
    507: "No room for results on disk",
}


def problems(*codes: int, repeat: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with these errors, and with `repeat` where an
    Idempotency-Key was seen before."""
    found: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem, "description": _MEANING[code]} for code in (401, *codes)
    }
    if repeat is not None:
        found[200] = {"model": repeat, "description": "This Idempotency-Key made it before"}
    return found


def stream(example: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a stream of server-sent events."""
    return {200: {"content": {"text/event-stream": {"example": example}}, "description": "Events"}}


def json_body(model: type[BaseModel], examples: dict[str, JsonValue]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself."""
    schema = model.model_json_schema()
    shown = {name: {"value": value} for name, value in examples.items()}
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema, "examples": shown}},
        }
    }
