"""ChatBuilder: chat completions as they grow, as chunks or as a whole, out of the same deltas."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from paged_backend.outputs import CompletionOutput
from paged_backend.remote.job import Job
from paged_backend.server.wire.logprobs import chat_logprobs, prompt_logprobs
from paged_backend.server.wire.replies import Reply
from paged_backend.server.wire.schema import ChatRequest
from paged_backend.server.wire.sse import DONE, event, json_text
from paged_backend.toolcalls import ChatCall, ToolCallDelta

Fields = dict[str, Any]


class ChatBuilder:
    """All choices of one request. model: as the client is to be told."""

    def __init__(self, body: ChatRequest, model: str, job: Job, call: ChatCall) -> None:
        self.job = job
        self._body = body
        self._head = {
            "id": f"chatcmpl-{body.request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._options = body.stream_options
        self._replies = [Reply(call.parser()) for _ in range(body.n or 1)]
        self._before = _text(body.messages[-1]) if body.echo else ""

    def _usage(self) -> Fields:
        job = self.job
        return {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.output_tokens,
            "total_tokens": job.prompt_tokens + job.output_tokens,
            "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def _reason(self, reply: Reply) -> str | None:
        """OpenAI's finish reason."""
        called = reply.finish_reason == "tool_calls" and self._body.functions is not None
        return "function_call" if called else reply.finish_reason

    def _logprobs(self, entries: list[Any]) -> Fields:
        body = self._body
        as_ids = bool(body.return_tokens_as_token_ids)
        return {"content": chat_logprobs(entries, body.top_logprobs or 0, as_ids), "refusal": None}

    # --- in one piece --------------------------------------------------------------------------------------------

    async def whole(self) -> str:
        """The completion as JSON."""
        outputs: dict[int, list[CompletionOutput]] = {}
        async for batch in self.job.news():
            for _, output in batch:
                self._replies[output.index].push(output)
                outputs.setdefault(output.index, []).append(output)
        made: Fields = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(outputs[index]) for index in sorted(outputs)],
            "usage": self._usage(),
        }
        remote = self.job.requests[0]
        made["prompt_logprobs"] = prompt_logprobs(remote.prompt_logprobs)
        if self._body.return_token_ids:
            made["prompt_token_ids"] = remote.prompt_token_ids
        return json_text(made)

    def _choice(self, parts: list[CompletionOutput]) -> Fields:
        last, body = parts[-1], self._body
        reply = self._replies[last.index]
        content, calls = self._before + reply.content, reply.calls
        message: Fields = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
        if calls and body.functions is not None:
            message["function_call"] = _function(calls[0])
        elif calls:
            message["tool_calls"] = [
                {"id": call.id or "", "type": "function", "function": _function(call)} for call in calls
            ]
        entries = [entry for part in parts for entry in part.logprobs or ()]
        choice: Fields = {
            "index": last.index,
            "message": message,
            "logprobs": self._logprobs(entries) if body.logprobs else None,
            "finish_reason": self._reason(reply),
            "stop_reason": last.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = [token for part in parts for token in part.token_ids]
        return choice

    # --- as a stream ---------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        body, remote = self._body, self.job.requests[0]
        first: Fields = {}
        opening = {"role": "assistant", "content": self._before}
        yield b"".join([self._event(_chunk(index, opening)) for index in range(body.n or 1)])
        if body.return_token_ids:
            first["prompt_token_ids"] = remote.prompt_token_ids
        async for batch in self.job.news():
            parts = []
            for _, output in batch:
                for choice in self._chunks(output):
                    if body.prompt_logprobs is not None and "prompt_logprobs" not in first:
                        first["prompt_logprobs"] = prompt_logprobs(remote.prompt_logprobs)
                        parts.append(self._event(choice, **first))
                    elif first and body.prompt_logprobs is None:
                        parts.append(self._event(choice, **first))
                        first = {}
                    else:
                        parts.append(self._event(choice))
            if parts:
                yield b"".join(parts)
        if self._options is not None and self._options.include_usage:
            yield self._event(usage=self._usage())
        yield DONE

    def _chunks(self, output: CompletionOutput) -> list[Fields]:
        body = self._body
        scored = bool(body.logprobs and output.logprobs)
        reply = self._replies[output.index]
        new = reply.push(output)
        chunks = []
        if new or scored or (body.return_token_ids and output.token_ids):
            delta: Fields = {"content": new.content} if new.content or not new.calls else {}
            if new.calls and body.functions is not None:
                delta["function_call"] = _function(new.calls[0])
            elif new.calls:
                delta["tool_calls"] = [_call_delta(call) for call in new.calls]
            chunk = _chunk(output.index, delta)
            if scored:
                chunk["logprobs"] = self._logprobs(output.logprobs or [])
            if body.return_token_ids:
                chunk["token_ids"] = output.token_ids
            chunks.append(chunk)
        if output.finish_reason is not None:
            ending = {"finish_reason": self._reason(reply), "stop_reason": output.stop_reason}
            chunks.append({**_chunk(output.index, {}), **ending})
        return chunks

    def _event(self, *choices: Fields, **extra: Any) -> bytes:
        options = self._options
        if options is not None and options.continuous_usage_stats and options.include_usage is not False:
            extra.setdefault("usage", self._usage())
        elif options is not None and options.include_usage:
            extra.setdefault("usage", None)
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices, **extra}
        return event(json_text(chunk))


def _chunk(index: int, delta: Fields) -> Fields:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _text(message: Mapping[str, Any]) -> str:
    """What the assistant has said in ``message`` already, if it is the assistant's."""
    content = message.get("content") if message.get("role") == "assistant" else None
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def _function(call: ToolCallDelta) -> Fields:
    """Name, where it is known, and arguments."""
    named = {} if call.name is None else {"name": call.name}
    return {**named, "arguments": call.arguments}


def _call_delta(call: ToolCallDelta) -> Fields:
    begun = {} if call.name is None else {"id": call.id, "type": "function"}
    return {"index": call.index, **begun, "function": _function(call)}
