"""Items of the Responses API: what a client sent, in the one form in which they are kept, and as messages of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.server.wire.errors import bad

_IDS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def input_items(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Copies of the items, each with a type, an id and content in parts. Raises :class:`ApiError`, naming the place."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(f"input.{number}", item) for number, item in enumerate(given)]


def _item(place: str, given: Any) -> dict[str, Any]:
    kind = given.get("type") or "message"
    if kind not in _IDS:
        raise bad(f"{place}.type", f"{kind!r:.60} is not supported", "unsupported_parameter")
    item = {"id": f"{_IDS[kind]}_{uuid.uuid4().hex}", **given, "type": kind}
    item["id"] = item["id"] or f"{_IDS[kind]}_{uuid.uuid4().hex}"
    if kind == "message":
        role = given.get("role")
        if not isinstance(role, str) or not role:
            raise bad(f"{place}.role", f"must be text, such as user or assistant, got {role!r:.60}")
        item["content"] = _parts(
            place, given.get("content"), "output_text" if role == "assistant" else "input_text"
        )
        item["status"] = given.get("status") or "completed"
    elif kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            if not isinstance(given.get(name), str):
                raise bad(f"{place}.{name}", "must be text")
    elif kind == "function_call_output":
        if not isinstance(given.get("call_id"), str):
            raise bad(f"{place}.call_id", "must be text")
        if not isinstance(given.get("output"), str):
            item["output"] = _parts(f"{place}.output", given.get("output"), "input_text")
    else:
        for name in ("summary", "content"):
            if given.get(name) is not None:
                item[name] = _parts(f"{place}.{name}", given[name], "reasoning_text")
    return item


def _parts(place: str, content: Any, kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise bad(place, "must be text or a list of parts")
    for part in content:
        found = part.get("type") if isinstance(part, Mapping) else None
        if found != "refusal" and found not in _TEXTS:
            raise bad(place, f"has a part of type {found!r:.60}; this model takes only text")
        if not isinstance(part.get("refusal" if found == "refusal" else "text"), str):
            raise bad(place, f"has a {found} part without its text")
    return content


def chat_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages of a chat: thoughts, text and calls in a row are one turn of the assistant."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item["type"]
        if kind == "message":
            text = _texts(item["content"])
            turn = messages[-1] if messages and item["role"] == "assistant" else None
            if turn is not None and turn["role"] == "assistant" and turn["content"] is None:
                turn["content"] = text
            else:
                messages.append({"role": item["role"], "content": text})
        elif kind == "function_call_output":
            output = item["output"]
            output = output if isinstance(output, str) else _texts(output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        else:
            if not messages or messages[-1]["role"] != "assistant" or kind == "reasoning":
                messages.append({"role": "assistant", "content": None})
            if kind == "reasoning":
                parts = item.get("content") or item.get("summary") or ()
                messages[-1]["reasoning_content"] = "\n".join(part["text"] for part in parts)
                continue
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _texts(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part.get("text", part.get("refusal"))} for part in parts]


def without_oldest_turns(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The chat without its first turn, without its first two, and so on; system messages and the last turn stay."""
    starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
    return [
        [
            message
            for number, message in enumerate(messages)
            if number >= start or message["role"] in ("system", "developer")
        ]
        for start in starts[1:]
    ]
