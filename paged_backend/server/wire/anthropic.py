"""Anthropic's Messages API on the wire: what a request means in the terms of a chat, and the shape of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, ClassVar

from pydantic import Field

from paged_backend.neutral import Neutral
from paged_backend.server.wire import neutral_fields
from paged_backend.server.wire.errors import ApiError, bad
from paged_backend.server.wire.schema import MAX_ID, Body, Sampling
from paged_backend.tokenization import ChatTokenizer
from paged_backend.toolcalls import reasoning_options

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
VERSION = "anthropic-version"
"""A header that all clients of Anthropic's API send, and no others."""
_LABELS = frozenset(("cache_control", "citations", "caller", "eager_input_streaming", "type"))
"""Fields of blocks and tools that ask for nothing: prefixes are always cached, and arguments always streamed."""


class Prompt(Body):
    """What a message answers: the fields that the counting of tokens takes."""

    neutral: ClassVar[Mapping[str, Neutral]] = neutral_fields.MESSAGES
    model: str | None = Field(None, description="As in /v1/models; may be left out.")
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = Field(None, description="disabled or adaptive.")
    output_config: dict[str, Any] | None = Field(None, description="format and effort.")
    chat_template_kwargs: dict[str, Any] | None = None
    split_special_tokens: bool | None = None


class CountTokensRequest(Prompt):
    """Messages whose tokens are to be counted."""


class MessagesRequest(Prompt, Sampling):
    """One message: the fields of several, of OpenAI's names and of token ids are not for this route."""

    max_tokens: int = Field(
        ge=1, le=MAX_ID, description="Or as many as the context leaves, if those are fewer."
    )
    stop_sequences: list[str] | None = None


def speaks_anthropic(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether errors are to have Anthropic's shape."""
    return path.startswith("/v1/messages") or VERSION.encode() in headers


def error_body(error: ApiError, request_id: str | None = None) -> bytes:
    """``error`` in Anthropic's shape."""
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    return json.dumps(body).encode()


def model_card(name: str, created: int, max_input_tokens: int) -> dict[str, Any]:
    """A model in Anthropic's list of models."""
    at = datetime.fromtimestamp(created, timezone.utc).isoformat().replace("+00:00", "Z")
    return {
        "type": "model", "id": name, "display_name": name, "created_at": at, "max_input_tokens": max_input_tokens,
    }  # fmt: skip


# --- a request as a chat --------------------------------------------------------------------------------------------


def chat_messages(body: Prompt) -> list[dict[str, Any]]:
    """System and messages in OpenAI's form. Turns of one role in a row are one turn. Raises :class:`ApiError`."""
    chat: list[dict[str, Any]] = []
    if body.system:
        chat.append({"role": "system", "content": _text("system", body.system)})
    if not body.messages:
        raise bad("messages", "must have at least one message")
    for number, message in enumerate(body.messages):
        place, role = f"messages.{number}", message.get("role")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise bad(f"{place}.content", "must be text or a list of blocks")
        if role == "assistant":
            _add_assistant(chat, place, blocks)
        elif role == "user":
            _add_user(chat, place, blocks)
        elif role == "system":
            chat.append({"role": "system", "content": _text(f"{place}.content", blocks)})
        else:
            raise bad(f"{place}.role", f"must be user, assistant or system, got {role!r:.60}")
    return chat


def _add_assistant(chat: list[dict[str, Any]], place: str, blocks: Sequence[Any]) -> None:
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": []})
    turn = chat[-1]
    for at, kind, block in _blocks(f"{place}.content", blocks):
        if kind == "text":
            turn["content"].append(_text_part(at, block))
        elif kind == "thinking":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _string(at, block, "thinking")
        elif kind == "redacted_thinking":
            continue  # encrypted by whoever wrote it: there is nothing to read
        elif kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise bad(f"{at}.input", "must be an object")
            function = {
                "name": _string(at, block, "name"),
                "arguments": json.dumps(given, ensure_ascii=False),
            }
            call = {"id": _string(at, block, "id"), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        else:
            raise _unknown(at, kind)


def _add_user(chat: list[dict[str, Any]], place: str, blocks: Sequence[Any]) -> None:
    for at, kind, block in _blocks(f"{place}.content", blocks):
        if kind == "tool_result":
            text = _text(f"{at}.content", block.get("content") or "")
            if block.get("is_error") and not (isinstance(text, str) and text.lower().startswith("error")):
                text = (
                    f"Error: {text}" if isinstance(text, str) else [{"type": "text", "text": "Error:"}, *text]
                )
            chat.append({"role": "tool", "tool_call_id": _string(at, block, "tool_use_id"), "content": text})
            continue
        if kind != "text":
            raise _unknown(at, kind)
        if not chat or chat[-1]["role"] != "user":
            chat.append({"role": "user", "content": []})
        chat[-1]["content"].append(_text_part(at, block))


def _blocks(place: str, blocks: Sequence[Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(where it is, its type, the block itself)"""
    found = []
    for number, block in enumerate(blocks):
        at = f"{place}.{number}"
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise bad(at, "must be a block with a type")
        found.append((at, block["type"], block))
    return found


def _text(place: str, content: Any) -> Any:
    """Text, or parts that are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(place, "must be text or a list of text blocks")
    parts = []
    for at, kind, block in _blocks(place, content):
        if kind != "text":
            raise _unknown(at, kind)
        parts.append(_text_part(at, block))
    return parts


def _text_part(at: str, block: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": _string(at, block, "text")}


def _string(at: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad(f"{at}.{name}", "must be text")
    return value


def _unknown(at: str, kind: str) -> ApiError:
    return bad(
        at, f"has type {kind!r:.60}, which is not supported: this model takes only text and tool calls"
    )


# --- tools and other options ----------------------------------------------------------------------------------------


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form."""
    return [_tool(f"tools.{number}", tool) for number, tool in enumerate(tools or ())] or None


def _tool(place: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad(
            place,
            f"has type {tool['type']!r:.60}, a tool of Anthropic's own: give it as a custom tool with an input_schema",
        )
    function: dict[str, Any] = {"name": _string(place, tool, "name")}
    for name, value in tool.items():
        if name == "input_schema":
            function["parameters"] = value
        elif name in ("description", "strict"):
            function[name] = value
        elif name not in ("name", *_LABELS) and value not in (None, False, [], ["direct"]):
            raise bad(f"{place}.{name}", "is not supported", "unsupported_parameter")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise bad(f"{place}.input_schema", "must be a JSON schema")
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """(OpenAI's tool_choice, its parallel_tool_calls)"""
    if choice is None:
        return None, None
    kind = choice.get("type")
    parallel = False if choice.get("disable_parallel_tool_use") else None
    if kind == "tool":
        return {"type": "function", "function": {"name": _string("tool_choice", choice, "name")}}, parallel
    named = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in named:
        raise bad("tool_choice.type", f"must be auto, any, tool or none, got {kind!r:.60}")
    return named[kind], parallel


def answer_form(body: Prompt) -> Mapping[str, Any] | None:
    """OpenAI's ``response_format``, None for free text."""
    config = body.output_config or {}
    for name in config.keys() - {"format", "effort"}:
        raise bad(f"output_config.{name}", "is not supported", "unsupported_parameter")
    form = config.get("format")
    if form is not None and not (
        isinstance(form, Mapping)
        and form.get("type") == "json_schema"
        and isinstance(form.get("schema"), Mapping)
    ):
        raise bad("output_config.format", "must be {type: json_schema, schema}")
    return form


def template_variables(body: Prompt, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """What ``thinking`` and ``output_config.effort`` say to the model's chat template."""
    kind, effort = (body.thinking or {}).get("type"), (body.output_config or {}).get("effort")
    if kind not in (None, "disabled", "adaptive"):
        # a share of max_tokens cannot be set aside for thoughts
        raise bad("thinking.type", f"must be disabled or adaptive, got {kind!r:.60}", "unsupported_parameter")
    wanted = None if kind is None else kind == "adaptive"
    return {
        **reasoning_options(tokenizer, wanted, None, "thinking"),
        **reasoning_options(tokenizer, None, effort, "output_config.effort"),
        **(body.chat_template_kwargs or {}),
    }
