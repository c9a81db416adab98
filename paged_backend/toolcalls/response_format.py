"""OpenAI's ``response_format`` in the engine's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_backend.constrain.options import StructuredOutputs
from paged_backend.errors import RequestRejectedError


def response_outputs(wanted: Any, place: str = "response_format") -> StructuredOutputs | None:
    """None for free text. wanted: as in the chat API, or with ``schema`` one level higher as in the Responses API.

    Raises ``RequestRejectedError``, which begins with ``place``.
    """
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise RequestRejectedError(f"{place}.type must be text, json_object or json_schema, got {kind!r:.60}")
    holder = wanted.get("json_schema", wanted)
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestRejectedError(f"{place} of type json_schema needs a schema")
    return StructuredOutputs(json=schema, strict=holder.get("strict") is True)
