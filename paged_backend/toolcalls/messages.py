"""OpenAI's messages and tools, in every form that its clients send, as the plain dicts that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.errors import RequestRejectedError
from paged_backend.text.chat_template import call_arguments, plain_data, tool_schema

KNOWN_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_TEXT_PARTS = (None, "text", "input_text", "output_text")


def normalize_messages(messages: Sequence[Any], knows_developer: bool = True) -> list[dict[str, Any]]:
    """Copies with role and content, calls with ids, names and objects as arguments, results with the id of their call.

    messages: dicts, dataclasses or pydantic objects. knows_developer: whether the chat template does; else that role is
    ``system``. A result without an id answers the first open call. OpenAI's older ``function_call`` and role
    ``function`` become their successors. Raises ``RequestRejectedError`` naming the field, as in
    ``messages.2.content is missing``.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestRejectedError(
            "messages must be a list of at least one message such as "
            f'{{"role": "user", "content": "Hello"}}, got {messages!r:.60}'
        )
    open_calls: dict[str, str] = {}
    chat = []
    for number, given in enumerate(messages):
        data = plain_data(given)
        if not isinstance(data, dict):
            raise _bad(number, "", f"must be an object with role and content, got {type(given).__name__}")
        message = {name: value for name, value in data.items() if value is not None}
        role = message.get("role")
        if not isinstance(role, str) or not role.strip():
            raise _bad(number, "role", f"must be text, such as user or assistant, got {role!r:.60}")
        _check_name(number, message)
        message["content"] = _content(number, message)
        _settle_calls(number, message)
        for call in message.get("tool_calls", ()):
            open_calls[call["id"]] = call["function"]["name"]
        if role in ("tool", "function"):
            _settle_result(number, message, open_calls)
        elif role == "developer" and not knows_developer:
            message["role"] = "system"
        chat.append(message)
    return chat


def normalize_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """``{"type": "function", "function": {name, ...}}`` of each, which may be a documented function or the inner dict
    alone. Raises ``RequestRejectedError`` naming the tool, as in ``tools.0 must ...``."""
    found = []
    for number, given in enumerate(tools or ()):
        tool = plain_data(tool_schema(given))
        inner = tool.get("function")
        if tool.get("type", "function") != "function":
            raise _bad_tool(number, f"must be of type function, got {tool['type']!r:.60}")
        if inner is None and "name" in tool:  # as in the Responses API, and in documents about functions
            inner = {name: value for name, value in tool.items() if name != "type"}
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise _bad_tool(number, "must have a function with a name")
        if not isinstance(inner.get("parameters") or {}, dict):
            raise _bad_tool(number, "has parameters that are not a JSON schema")
        inner = {name: value for name, value in inner.items() if value is not None}
        found.append({"type": "function", "function": inner})
    return found


def text_of(content: Any) -> str:
    """Text of a message's content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, str) else part.get("text", "") for part in content or ()]
    return "\n".join(part for part in parts if part)


def _content(number: int, message: dict[str, Any]) -> Any:
    content, role = message.get("content"), message["role"]
    if isinstance(content, str):
        return content
    if content is None:
        if isinstance(message.get("refusal"), str):
            return message["refusal"]
        # an answer may have been nothing but calls or reasoning, a function may give back nothing
        if role in ("assistant", "tool", "function"):
            return ""
        raise _bad(number, "content", f"is missing: the message has only {', '.join(message)}")
    if not isinstance(content, (list, tuple)):
        raise _bad(number, "content", f"must be text or a list of parts, got {type(content).__name__}")
    return [{"type": "text", "text": _part(number, part)} for part in content] or ""


def _part(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    name = "refusal" if kind == "refusal" else "text"
    if kind != "refusal" and (not isinstance(part, dict) or kind not in _TEXT_PARTS):
        raise _bad(number, "content", f"has a part of type {kind!r:.60}; this model takes only text")
    if not isinstance(part.get(name), str):
        raise _bad(number, "content", f"has a {name} part without its text")
    text: str = part[name]
    return text


def _check_name(number: int, message: dict[str, Any]) -> None:
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise _bad(number, "name", f"must be text, got {type(name).__name__}")
    if name == "":
        del message["name"]


def _settle_calls(number: int, message: dict[str, Any]) -> None:
    legacy = message.pop("function_call", None)
    calls = message.pop("tool_calls", None)
    if calls is None and legacy is not None:
        calls = [{"function": legacy}]
    if not calls:
        return
    if not isinstance(calls, (list, tuple)):
        raise _bad(number, "tool_calls", "must be a list")
    settled = []
    for place, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(number, "tool_calls", "must be objects with a function that has a name")
        index = str(call.get("id") or f"call_{number}_{place}")
        inner = {"name": function["name"], "arguments": call_arguments(function.get("arguments"))}
        settled.append({"id": index, "type": "function", "function": inner})
    message["tool_calls"] = settled


def _settle_result(number: int, message: dict[str, Any], open_calls: dict[str, str]) -> None:
    """Give a result the id and the name of the call that it answers. An unknown id stays: its call may be long gone."""
    index, name = message.get("tool_call_id"), message.get("name")
    if not index:
        index = next((key for key, called in open_calls.items() if name in (None, called)), None)
    if not index and message["role"] == "function":
        index = f"call_{number}_0"
    if not index:
        raise _bad(number, "tool_call_id", "is missing: a tool message must name the call it answers")
    message["role"], message["tool_call_id"] = "tool", str(index)
    called = open_calls.pop(message["tool_call_id"], None)
    if name is None and called is not None:
        message["name"] = called


def _bad(number: int, name: str, problem: str) -> RequestRejectedError:
    return RequestRejectedError(f"messages.{number}{'.' if name else ''}{name} {problem}")


def _bad_tool(number: int, problem: str) -> RequestRejectedError:
    return RequestRejectedError(f"tools.{number} {problem}")
