"""LangChain's messages to the OpenAI form that chat templates are given, and a reply back to an AIMessage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk

from paged_backend.adapters.common import usage
from paged_backend.adapters.langchain.base import InvalidRequestError
from paged_backend.outputs import RequestOutput
from paged_backend.toolcalls import InvalidToolCall, ParsedReply, ReplyDelta

# blocks of an AI message that say again what tool_calls say, or are no part of the answer
_DROPPED = frozenset(
    {
        "tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "server_tool_call", "server_tool_result",
        "function_call", "thinking", "redacted_thinking", "reasoning", "cachePoint", "cache_point",
    }
)  # fmt: skip


def to_dicts(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Raises ``InvalidRequestError`` for content that is not text."""
    return [_to_dict(message) for message in messages]


def _to_dict(message: BaseMessage) -> dict[str, Any]:
    data: dict[str, Any] = {"role": _role(message), "content": text_of(message.content)}
    if message.name:
        data["name"] = message.name
    if isinstance(message, ToolMessage):
        data["tool_call_id"] = message.tool_call_id
        if message.status == "error":
            data["content"] = f"Error: {data['content']}"
    if isinstance(message, AIMessage):
        calls = [_call(call["id"], call["name"], call["args"]) for call in message.tool_calls]
        calls += [
            _call(call["id"], call["name"] or "", call["args"] or "") for call in message.invalid_tool_calls
        ]
        if calls:
            data["tool_calls"] = calls
        elif message.additional_kwargs.get("function_call"):
            data["function_call"] = message.additional_kwargs["function_call"]
    return data


def _call(index: str | None, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": index or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _role(message: BaseMessage) -> str:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage):
        return "assistant"
    if isinstance(message, SystemMessage):
        return str(message.additional_kwargs.get("__openai_role__", "system"))
    if isinstance(message, ToolMessage):
        return "tool"
    if isinstance(message, FunctionMessage):
        return "function"
    if isinstance(message, ChatMessage):
        return message.role
    raise InvalidRequestError(f"a message of type {type(message).__name__} has no role in a chat template")


def text_of(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if isinstance(block, str):
            texts.append(block)
            continue
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in _DROPPED:
            continue
        if kind == "tool_result":
            texts.append(text_of(block.get("content") or ""))
        elif isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "json" or "json" in block:
            texts.append(str(block.get("json")))
        else:
            raise InvalidRequestError(f"this model takes text only, got a content block of type {kind!r}")
    return "\n".join(texts)


def message_from(reply: ParsedReply, **fields: Any) -> AIMessage:
    return AIMessage(
        content=reply.content,
        tool_calls=[tool_call(name=call.name, args=call.parsed, id=call.id) for call in reply.calls],
        invalid_tool_calls=[
            invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=call.error)
            for call in reply.invalid
        ],
        **fields,
    )


def chunk_from(delta: ReplyDelta, spoiled: Sequence[Any] = (), **fields: Any) -> AIMessageChunk:
    """spoiled: further chunks, from :func:`spoil`. Pieces of one call become one chunk, else they are never joined."""
    merged: dict[int, dict[str, Any]] = {}
    for call in delta.calls:
        entry = merged.setdefault(call.index, {"name": None, "args": "", "id": None})
        entry["name"], entry["id"] = entry["name"] or call.name, entry["id"] or call.id
        entry["args"] += call.arguments
    for chunk in spoiled:
        entry = merged.setdefault(chunk["index"], {"name": chunk["name"], "args": "", "id": chunk["id"]})
        entry["args"] += chunk["args"]
    chunks = [tool_call_chunk(index=index, **entry) for index, entry in merged.items()]
    return AIMessageChunk(content=delta.content, tool_call_chunks=chunks, **fields)


def spoil(invalid: Sequence[InvalidToolCall], streamed: Mapping[str, tuple[int, str]]) -> list[Any]:
    """Chunks after which no reader takes invalid calls for valid ones.

    LangChain completes the brackets of arguments that were cut off, which makes a call out of half a call. A bracket
    that fits nowhere keeps it from that. streamed: by call id, its index and the arguments that were sent so far.
    """
    chunks = []
    for call in invalid:
        if call.id in streamed:
            index, sent = streamed[call.id]
            rest = call.arguments[len(sent) :] if call.arguments.startswith(sent) else ""
            chunks.append(tool_call_chunk(name=None, args=rest + _unfit(sent + rest), id=None, index=index))
        else:
            index = 1000 + len(chunks)  # beside the calls that have a place
            args = call.arguments + _unfit(call.arguments)
            chunks.append(tool_call_chunk(name=call.name or "", args=args, id=call.id, index=index))
    return chunks


def _unfit(text: str) -> str:
    """What to append to ``text`` so that it is not the beginning of any JSON."""
    stack: list[str] = []
    inside = escaped = False
    for char in text:
        if inside:
            inside = char != '"' or escaped
            escaped = char == "\\" and not escaped
        elif char == '"':
            inside, escaped = True, False
        elif char in "{[":
            stack.append("}" if char == "{" else "]")
        elif char in "}]" and stack:
            stack.pop()
    wrong = "]" if stack and stack[-1] == "}" else "}"
    return ("\\" if escaped else "") + ('"' if inside else "") + wrong


def usage_metadata(output: RequestOutput, completion_tokens: int) -> UsageMetadata:
    """input_token_details.cache_read counts prompt tokens that came from the prefix cache."""
    counts = usage([output])
    return UsageMetadata(
        input_tokens=counts["prompt_tokens"],
        output_tokens=completion_tokens,
        total_tokens=counts["prompt_tokens"] + completion_tokens,
        input_token_details=InputTokenDetails(cache_read=counts["cached_tokens"]),
        output_token_details=OutputTokenDetails(),
    )
