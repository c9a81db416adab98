"""LlamaIndex's messages to the OpenAI form that chat templates are given, and a growing reply back to responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from paged_backend.adapters.common import usage
from paged_backend.errors import RequestRejectedError
from paged_backend.outputs import CompletionOutput, RequestOutput
from paged_backend.toolcalls import ChatCall, ParsedReply, ReplyDelta

_ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def to_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Raises ``RequestRejectedError`` for blocks that are not text."""
    return [_to_dict(message) for message in messages]


def _to_dict(message: ChatMessage) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    _read(message.blocks, texts, calls)
    extra = message.additional_kwargs
    data: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role.value),
        "content": "\n".join(texts),
    }
    if extra.get("tool_call_id"):
        data["tool_call_id"] = extra["tool_call_id"]
    if extra.get("name"):
        data["name"] = extra["name"]
    if not calls:  # the blocks and additional_kwargs tell of the same calls
        calls = [
            dict(call) if isinstance(call, Mapping) else call.model_dump()
            for call in extra.get("tool_calls") or ()
        ]
    if calls:
        data["tool_calls"] = calls
    return data


def _read(blocks: Sequence[Any], texts: list[str], calls: list[dict[str, Any]]) -> None:
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolCallBlock):
            calls.append(openai_call(block.tool_call_id or "", block.tool_name, block.tool_kwargs))
        elif isinstance(block, CitableBlock):
            _read(block.content, texts, calls)
        elif isinstance(block, CitationBlock):
            _read([block.cited_content], texts, calls)
        elif not isinstance(block, (ThinkingBlock, CachePoint)):
            raise RequestRejectedError(f"this model takes text only, got a {type(block).__name__}")


def openai_call(index: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": index, "type": "function", "function": {"name": name, "arguments": arguments}}


def raw_of(output: RequestOutput, model: str, completion_tokens: int | None = None) -> dict[str, Any]:
    """What a response's ``raw`` holds; LlamaIndex's token counter reads ``usage``."""
    counts = usage([output])
    if completion_tokens is not None:
        counts["completion_tokens"] = completion_tokens
        counts["total_tokens"] = counts["prompt_tokens"] + completion_tokens
    return {
        "id": output.request_id,
        "model": model,
        "choices": [
            {"index": c.index, "text": c.text, "finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
            for c in output.outputs
        ],
        "usage": counts,
    }


def logprobs_of(completion: CompletionOutput) -> list[list[LogProb]] | None:
    """Per position the token itself, then the alternatives."""
    if completion.logprobs is None:
        return None
    rows = []
    for entry in completion.logprobs:
        rows.append(
            [
                LogProb(token=item.token, logprob=item.logprob, bytes=list(item.utf8))
                for item in entry.values()
            ]
        )
    return rows


def response_from(
    reply: ParsedReply,
    raw: dict[str, Any],
    logprobs: Any,
    finish_reason: str | None,
    delta: str | None = None,
) -> ChatResponse:
    """Calls stand in blocks and in ``additional_kwargs``: parts of LlamaIndex read the one, parts the other."""
    blocks: list[Any] = [TextBlock(text=reply.content)] if reply.content or not reply.calls else []
    blocks += [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.parsed)
        for call in reply.calls
    ]
    extra: dict[str, Any] = {}
    if reply.calls:
        extra["tool_calls"] = [openai_call(call.id, call.name, call.arguments) for call in reply.calls]
    if reply.invalid:
        extra["invalid_tool_calls"] = [
            {**openai_call(call.id, call.name or "", call.arguments), "error": call.error}
            for call in reply.invalid
        ]
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra)
    return ChatResponse(
        message=message,
        raw=raw,
        delta=delta,
        logprobs=logprobs,
        additional_kwargs={"finish_reason": finish_reason, **raw["usage"]} if finish_reason else {},
    )


class ReplyStream:
    """Turns the deltas of one request into LlamaIndex's cumulative responses."""

    def __init__(self, call: ChatCall, model: str) -> None:
        self._model = model
        self._parser = call.parser()
        self._content = ""
        self._tokens = 0
        self._open: dict[int, dict[str, Any]] = {}

    def response(self, output: RequestOutput) -> ChatResponse | None:
        """The reply so far; None while nothing of it can be shown."""
        completion = output.outputs[0]
        self._tokens += len(completion.token_ids)
        raw = raw_of(output, self._model, self._tokens)
        logprobs = logprobs_of(completion)
        reason = completion.finish_reason
        delta = ReplyDelta(completion.text) if self._parser is None else self._parser.push(completion.text)
        self._take(delta)
        if not output.finished:
            if not delta and not logprobs:
                return None
            extra = {"tool_calls": list(self._open.values())} if self._open else {}
            blocks: list[Any] = [TextBlock(text=self._content)]
            message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra)
            return ChatResponse(message=message, raw=raw, delta=delta.content, logprobs=logprobs)
        shown = delta.content
        if self._parser is None:
            return response_from(ParsedReply(self._content), raw, logprobs, reason, shown)
        last = self._parser.finish(truncated=reason == "length")
        reply = self._parser.reply
        return response_from(reply, raw, logprobs, reply.finish_reason(reason), shown + last.content)

    def _take(self, delta: ReplyDelta) -> None:
        self._content += delta.content
        for piece in delta.calls:
            if piece.id is not None:
                self._open[piece.index] = openai_call(piece.id, piece.name or "", "")
            function = self._open[piece.index]["function"]
            self._open[piece.index] = {
                **self._open[piece.index],
                "function": {**function, "arguments": function["arguments"] + piece.arguments},
            }
