"""What form an answer must have: ``response_format`` and ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_backend.server.errors import ApiError
from paged_backend.server.schema import ChatRequest, CompletionRequest


def structured_outputs(body: ChatRequest | CompletionRequest) -> dict[str, Any] | None:
    """The engine's ``structured_outputs`` of a request, None for free text."""
    own = body.structured_outputs
    own = None if own is None else {name: value for name, value in own.items() if value is not None}
    form = body.response_format
    if form is None:
        return own
    if own is not None:
        raise _bad("response_format and structured_outputs exclude each other")
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        return {"json": schema_of(form.get("json_schema"))}
    raise _bad(f"response_format.type must be text, json_object or json_schema, got {kind!r:.60}")


def schema_of(given: Any) -> Mapping[str, Any]:
    """The schema in OpenAI's ``{name, schema, strict}``."""
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if schema is None:
        return {}
    if not isinstance(schema, Mapping):
        raise _bad("response_format.json_schema.schema must be an object")
    return schema


def _bad(message: str) -> ApiError:
    return ApiError(400, message, param="response_format", code="invalid_value")
