"""MessageBuilder: an answer of the Messages API as it grows, as events or as a whole, out of the same blocks."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import from_json

from paged_backend.outputs import CompletionOutput
from paged_backend.remote.job import Job
from paged_backend.server.wire.replies import Reply
from paged_backend.server.wire.sse import event, json_text
from paged_backend.toolcalls import ToolCallDelta

PING_SECONDS = 10.0
"""Silence after which a stream says that it still lives."""


class MessageBuilder:
    """model: as the client named it. full: whether the context leaves less than the max_tokens asked for."""

    def __init__(self, job: Job, reply: Reply, name: str, model: str, full: bool) -> None:
        self.job = job
        self._reply = reply
        self._name = name
        self._model = model
        self._full = full
        self._last = CompletionOutput(0)
        self._index = -1
        self._open: str | int | None = None
        """What the block in progress is: thinking, text, or the number of a call."""

    async def whole(self) -> str:
        """The message as JSON."""
        async for batch in self.job.news():
            for _, self._last in batch:
                self._reply.push(self._last)
        reply = self._reply
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        content += [{**_tool_use(call), "input": _input(call.arguments)} for call in reply.calls]
        return json_text({**self._message(), "content": content, **self._ending(), "usage": self._usage()})

    async def events(self) -> AsyncIterator[bytes]:
        usage = {"input_tokens": self.job.prompt_tokens, "output_tokens": 0}
        yield _event({"type": "message_start", "message": {**self._message(), "usage": usage}}) + _PING
        async for batch in self.job.news(PING_SECONDS):
            if not batch:
                yield _PING
            happened = b"".join([self._advance(self._last) for _, self._last in batch])
            if happened:
                yield happened
        yield (
            self._closed()
            + _event({"type": "message_delta", "delta": self._ending(), "usage": self._usage()})
            + _event({"type": "message_stop"})
        )

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._name, "type": "message", "role": "assistant", "model": self._model, "content": [],
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    def _ending(self) -> dict[str, Any]:
        reason, stop = self._reply.finish_reason, self._last.stop_reason
        if reason == "length":
            return {
                "stop_reason": "model_context_window_exceeded" if self._full else "max_tokens",
                "stop_sequence": None,
            }
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        cached = self.job.cached_tokens
        return {
            "input_tokens": self.job.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.job.output_tokens,
            "output_tokens_details": {"thinking_tokens": self._reply.reasoning_tokens},
        }

    # --- what an output adds: the end of one block, the beginning of another, pieces -----------------------------

    def _advance(self, output: CompletionOutput) -> bytes:
        new = self._reply.push(output)
        parts = []
        if new.reasoning:
            parts.append(self._begun("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
            parts.append(self._delta({"type": "thinking_delta", "thinking": new.reasoning}))
        if new.content:
            parts.append(self._begun("text", {"type": "text", "text": ""}))
            parts.append(self._delta({"type": "text_delta", "text": new.content}))
        for call in new.calls:
            parts.append(self._begun(call.index, _tool_use(call)))
            if call.arguments:
                parts.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return b"".join(parts)

    def _begun(self, kind: str | int, block: dict[str, Any]) -> bytes:
        if kind == self._open:
            return b""
        closed = self._closed()
        self._open = kind
        self._index += 1
        return closed + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event({"type": "content_block_stop", "index": self._index})


def message_id(given: str | None) -> str:
    return f"msg_{given or uuid.uuid4().hex}"


def _tool_use(call: ToolCallDelta) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; of those that were cut off, what there is."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _event(value: dict[str, Any]) -> bytes:
    return event(json_text(value), value["type"])


_PING = _event({"type": "ping"})
