"""``functions`` and ``function_call``, the old names of tools: the request in today's form, the answer in theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.schema import ChatRequest


def modern(body: ChatRequest) -> ChatRequest:
    """``body`` with tools instead of functions, in its messages too. Raises :class:`ApiError`."""
    changes: dict[str, Any] = {}
    if any(m.get("function_call") is not None or m.get("role") == "function" for m in body.messages):
        changes["messages"] = _messages(body.messages)
    if body.functions is not None:
        for name in ("tools", "tool_choice"):
            if getattr(body, name) is not None:
                raise _bad("functions", f"and {name} exclude each other: one is the old name of the other")
        if not body.functions:
            raise _bad("functions", "must have at least one function, or be left out")
        changes["tools"] = [{"type": "function", "function": function} for function in body.functions]
        changes["parallel_tool_calls"] = False  # the old form has room for one call
        choice = body.function_call
        changes["tool_choice"] = (
            {"type": "function", "function": choice} if isinstance(choice, dict) else choice
        )
    elif body.function_call not in (None, "none"):
        raise _bad("function_call", "needs functions")
    return body.model_copy(update=changes) if changes else body


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made, call_id = [], ""
    for number, message in enumerate(messages):
        call = message.get("function_call")
        if call is not None:
            if not isinstance(call, Mapping) or message.get("tool_calls"):
                raise _bad(
                    f"messages.{number}.function_call", "must be one object, without tool_calls beside it"
                )
            call_id = f"call_{number}"
            message = {name: value for name, value in message.items() if name != "function_call"}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": call}]
        elif message.get("role") == "function":
            if not call_id:
                raise _bad(f"messages.{number}.role", "is 'function', but no message before it calls one")
            message = {**message, "role": "tool", "tool_call_id": call_id}
        made.append(message)
    return made


def _bad(param: str, problem: str) -> ApiError:
    return ApiError(400, f"{param} {problem}", param=param, code="invalid_value")
