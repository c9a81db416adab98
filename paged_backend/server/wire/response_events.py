"""ResponseBuilder: a Responses API answer as it grows, as typed events or as a whole, out of the same items."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from paged_backend.outputs import CompletionOutput
from paged_backend.remote.job import Job
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.logprobs import chat_logprobs
from paged_backend.server.wire.replies import Reply
from paged_backend.server.wire.sse import event, json_text
from paged_backend.toolcalls import ToolCallDelta

Fields = dict[str, Any]


class ResponseBuilder:
    """base: the fields of the response that echo the request. top: alternatives per token in logprobs.

    keep: given the whole response as JSON before the client is told that it is complete.
    """

    def __init__(
        self, base: Fields, job: Job, reply: Reply, top: int, keep: Callable[[str], None] = lambda body: None
    ) -> None:
        self.job = job
        self._base = base
        self._reply = reply
        self._top = top
        self._keep = keep
        self._sequence = 0
        self._items: list[Fields] = []
        self._thoughts: Fields | None = None
        self._message: Fields | None = None
        self._calls: dict[int, Fields] = {}
        self._logprobs: list[Fields] = []

    async def whole(self) -> str:
        """The response as JSON."""
        async for batch in self.job.news():
            for _, output in batch:
                self._advance(output)
        self._close()
        body = json_text(self._response(self._status))
        self._keep(body)
        return body

    async def events(self) -> AsyncIterator[bytes]:
        opening = self._response("in_progress")
        yield self._sent([_of("created", response=opening), _of("in_progress", response=opening)])
        async for batch in self.job.news():
            happened = [each for _, output in batch for each in self._advance(output)]
            if happened:
                yield self._sent(happened)
        closing = self._close()
        last = self._response(self._status)
        self._keep(json_text(last))
        yield self._sent([*closing, _of(self._status, response=last)])

    def failure(self, error: ApiError) -> bytes:
        """What a stream ends with when it cannot go on."""
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return self._sent([told])

    def _sent(self, events: list[Fields]) -> bytes:
        parts = []
        for each in events:
            parts.append(event(json_text({**each, "sequence_number": self._sequence}), each["type"]))
            self._sequence += 1
        return b"".join(parts)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reply.finish_reason == "length" else "completed"

    def _response(self, status: str) -> Fields:
        done, job = status != "in_progress", self.job
        usage = {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens},
            "output_tokens": job.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reply.reasoning_tokens},
            "total_tokens": job.prompt_tokens + job.output_tokens,
        }
        return {
            **self._base,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items if done else [],
            "usage": usage if done else None,
            "completed_at": int(time.time()) if status == "completed" else None,
        }

    # --- what an output adds: items, changed in place, and the events that tell of it ---------------------------------

    def _advance(self, output: CompletionOutput) -> list[Fields]:
        new = self._reply.push(output)
        scored = []
        if output.logprobs and not self._reply.thinking:
            scored = chat_logprobs(output.logprobs, self._top)
            self._logprobs += scored
        events: list[Fields] = []
        if new.reasoning:
            events += self._reasoning(new.reasoning)
        if new.content or new.calls or scored:
            events += self._end_reasoning("completed")
        if new.content or scored:
            events += self._text(new.content, scored)
        for call in new.calls:
            events += self._call(call)
        return events

    def _reasoning(self, text: str) -> list[Fields]:
        events: list[Fields] = []
        item, part = self._thoughts, {"type": "reasoning_text", "text": ""}
        if item is None:
            item = self._thoughts = {
                "id": f"rs_{uuid.uuid4().hex}",
                "type": "reasoning",
                "summary": [],
                "content": [],
            }
            events += [self._added(item), self._of_part("content_part.added", item, part={**part})]
            item["content"].append(part)
        return [*events, self._of_part("reasoning_text.delta", item, delta=text)]

    def _end_reasoning(self, status: str) -> list[Fields]:
        item = self._thoughts
        if item is None or "status" in item:
            return []
        item["status"] = status
        part = item["content"][0]
        part["text"] = self._reply.reasoning
        return [
            self._of_part("reasoning_text.done", item, text=part["text"]),
            self._of_part("content_part.done", item, part=part),
            self._of_item("output_item.done", item),
        ]

    def _text(self, text: str, scored: list[Fields]) -> list[Fields]:
        events: list[Fields] = []
        item = self._message
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if item is None:
            item = self._message = {
                "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress",
                "content": [],
            }  # fmt: skip
            events += [self._added(item), self._of_part("content_part.added", item, part={**part})]
            item["content"].append(part)
        return [*events, self._of_part("output_text.delta", item, delta=text, logprobs=scored)]

    def _call(self, call: ToolCallDelta) -> list[Fields]:
        events: list[Fields] = []
        item = self._calls.get(call.index)
        if item is None:
            item = self._calls[call.index] = {
                "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call.id, "name": call.name,
                "arguments": "", "status": "in_progress",
            }  # fmt: skip
            events.append(self._added(item))
        if call.arguments:
            delta = {"item_id": item["id"], "output_index": self._index(item), "delta": call.arguments}
            events.append(_of("function_call_arguments.delta", **delta))
        return events

    def _close(self) -> list[Fields]:
        """End every item, as the response itself ends."""
        events = self._end_reasoning(self._status)
        if not self._items:
            events += self._text("", [])
        for call in self._reply.calls:
            self._calls[call.index]["arguments"] = call.arguments
        for item in self._items:
            if item is self._thoughts:
                continue
            item["status"] = self._status
            if item is self._message:
                part = item["content"][0]
                part.update(text=self._reply.content, logprobs=self._logprobs)
                told = {"text": part["text"], "logprobs": self._logprobs}
                events += [
                    self._of_part("output_text.done", item, **told),
                    self._of_part("content_part.done", item, part=part),
                ]
            else:
                told = {"item_id": item["id"], "arguments": item["arguments"], "name": item["name"]}
                events.append(_of("function_call_arguments.done", output_index=self._index(item), **told))
            events.append(self._of_item("output_item.done", item))
        return events

    # --- events ------------------------------------------------------------------------------------------------------

    def _added(self, item: Fields) -> Fields:
        self._items.append(item)
        return self._of_item("output_item.added", _copy(item))

    def _index(self, item: Fields) -> int:
        return next(number for number, other in enumerate(self._items) if other["id"] == item["id"])

    def _of_item(self, kind: str, item: Fields) -> Fields:
        return _of(kind, output_index=self._index(item), item=item)

    def _of_part(self, kind: str, item: Fields, **fields: Any) -> Fields:
        return _of(kind, item_id=item["id"], output_index=self._index(item), content_index=0, **fields)


def _of(kind: str, **fields: Any) -> Fields:
    return {"type": f"response.{kind}", **fields}


def _copy(item: Fields) -> Fields:
    """As it is now: events are written after all that happened together."""
    return {name: [*value] if isinstance(value, list) else value for name, value in item.items()}
