"""What form an answer must have: ``response_format`` and ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.schema import ChatRequest, CompletionRequest


def structured_outputs(body: ChatRequest | CompletionRequest) -> dict[str, Any] | None:
    """The engine's ``structured_outputs`` of a request, None for free text."""
    own = body.structured_outputs
    own = None if own is None else {name: value for name, value in own.items() if value is not None}
    form = body.response_format
    if form is None:
        return own
    if own is not None:
        raise _bad("response_format and structured_outputs exclude each other")
    return form_as_structured(form, form.get("json_schema"), "response_format")


def form_as_structured(form: Any, holder: Any, place: str) -> dict[str, Any] | None:
    """What the engine needs of OpenAI's ``{type: ...}``. holder: where ``schema`` stands for type json_schema."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise _bad(f"{place}.type must be text, json_object or json_schema, got {kind!r:.60}", place)
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        raise _bad(f"{place} of type json_schema needs a schema", place)
    return {"json": schema}


def _bad(message: str, param: str = "response_format") -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
