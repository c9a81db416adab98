"""/v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from openai.types import CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import (
    ChoiceDelta,
    ChoiceDeltaFunctionCall,
    ChoiceDeltaToolCall,
    ChoiceDeltaToolCallFunction,
)
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message import FunctionCall
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails

from paged_backend.outputs import CompletionOutput
from paged_backend.remote.job import Job
from paged_backend.server.routes.answers import EventStream, json_answer, unless_gone
from paged_backend.server.routes.prompts import open_chat, template_options
from paged_backend.server.routes.serving import Serving, serving_of
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.formats import own_form
from paged_backend.server.wire.legacy import modern
from paged_backend.server.wire.logprobs import chat_logprobs, prompt_logprobs
from paged_backend.server.wire.replies import Reply
from paged_backend.server.wire.sampling import check_listed, to_params
from paged_backend.server.wire.schema import ChatRequest, body_of, read_body
from paged_backend.server.wire.sse import DONE, event
from paged_backend.toolcalls import ChatCall, ToolCallDelta

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest), response_model=ChatCompletion)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation. With ``stream``: server-sent events."""
    serving = serving_of(request)
    body = modern(await read_body(request, ChatRequest))
    serving.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options", code="invalid_value")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs", code="invalid_value")
    answer = await unless_gone(serving, request, _open(serving, body))
    request.state.job = answer.job  # for the log
    if body.stream:
        return EventStream(serving, answer.job, answer.events())
    with answer.job:
        completion = await unless_gone(serving, request, answer.whole())
    return json_answer(completion.model_dump_json(exclude_unset=True))


async def _open(serving: Serving, body: ChatRequest) -> _Answer:
    if body.max_tokens not in (None, body.max_completion_tokens or body.max_tokens):
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens differ: give one of them",
            param="max_tokens",
            code="invalid_value",
        )
    max_tokens = body.max_completion_tokens or body.max_tokens
    params = to_params(
        body,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=own_form(body),
    )
    ids, call = await open_chat(
        serving,
        body,
        body.messages,
        params,
        max_tokens,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=body.response_format,
        **template_options(serving, body),
    )
    check_listed(call.params, [ids], serving.tokenizer.vocab_size)
    return _Answer(serving, body, await serving.client.open([ids], call.params, body.cache_salt), call)


class _Answer:
    """One chat completion as it comes."""

    def __init__(self, serving: Serving, body: ChatRequest, job: Job, call: ChatCall) -> None:
        self.job = job
        self._body = body
        self._id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = body.model or serving.name
        self._options = body.stream_options
        self._replies = [Reply(call.parser()) for _ in range(body.n or 1)]
        self._before = _text(body.messages[-1]) if body.echo else ""

    def _reason(self, reply: Reply) -> Any:
        """OpenAI's finish reason."""
        called = reply.finish_reason == "tool_calls" and self._body.functions is not None
        return "function_call" if called else reply.finish_reason

    def _usage(self) -> CompletionUsage:
        return CompletionUsage(
            prompt_tokens=self.job.prompt_tokens,
            completion_tokens=self.job.output_tokens,
            total_tokens=self.job.prompt_tokens + self.job.output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.job.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=0),
        )

    # --- in one piece --------------------------------------------------------------------------------------------

    async def whole(self) -> ChatCompletion:
        outputs: dict[int, list[CompletionOutput]] = {}
        async for batch in self.job.news():
            for _, output in batch:
                self._replies[output.index].push(output)
                outputs.setdefault(output.index, []).append(output)
        remote = self.job.requests[0]
        extra: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(remote.prompt_logprobs)
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = remote.prompt_token_ids
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._choice(outputs[index]) for index in sorted(outputs)],
            usage=self._usage(),
            **extra,
        )

    def _choice(self, parts: list[CompletionOutput]) -> Choice:
        last, body = parts[-1], self._body
        logprobs = None
        if body.logprobs:
            entries = [entry for part in parts for entry in part.logprobs or ()]
            as_ids = bool(body.return_tokens_as_token_ids)
            logprobs = ChoiceLogprobs(
                content=chat_logprobs(entries, body.top_logprobs or 0, as_ids), refusal=None
            )
        extra: dict[str, Any] = {"stop_reason": last.stop_reason}
        if body.return_token_ids:
            extra["token_ids"] = [token for part in parts for token in part.token_ids]
        reply = self._replies[last.index]
        content = self._before + reply.content
        message = ChatCompletionMessage(role="assistant", content=content, refusal=None)
        if reply.calls and body.functions is not None:
            message.content, call = content or None, reply.calls[0]
            message.function_call = FunctionCall(name=call.name or "", arguments=call.arguments)
        elif reply.calls:
            message.content = content or None
            message.tool_calls = [
                ChatCompletionMessageFunctionToolCall(
                    id=call.id or "",
                    type="function",
                    function=Function(name=call.name or "", arguments=call.arguments),
                )
                for call in reply.calls
            ]
        return Choice(
            index=last.index,
            message=message,
            logprobs=logprobs,
            finish_reason=self._reason(reply),
            **extra,
        )

    # --- as a stream ---------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        body, remote = self._body, self.job.requests[0]
        first: dict[str, Any] = {}
        yield b"".join(
            self._event(
                [
                    ChunkChoice(
                        index=i,
                        delta=ChoiceDelta(role="assistant", content=self._before),
                        finish_reason=None,
                    )
                ]
            )
            for i in range(body.n or 1)
        )
        if body.return_token_ids:
            first["prompt_token_ids"] = remote.prompt_token_ids
        async for batch in self.job.news():
            parts = []
            for _, output in batch:
                for choice in self._chunks(output):
                    if body.prompt_logprobs is not None and "prompt_logprobs" not in first:
                        first["prompt_logprobs"] = prompt_logprobs(remote.prompt_logprobs)
                        parts.append(self._event([choice], **first))
                    elif first and body.prompt_logprobs is None:
                        parts.append(self._event([choice], **first))
                        first = {}
                    else:
                        parts.append(self._event([choice]))
            if parts:
                yield b"".join(parts)
        if self._options is not None and self._options.include_usage:
            yield self._event([], usage=self._usage())
        yield DONE

    def _chunks(self, output: CompletionOutput) -> list[ChunkChoice]:
        body = self._body
        logprobs = None
        if body.logprobs and output.logprobs:
            as_ids = bool(body.return_tokens_as_token_ids)
            content = chat_logprobs(output.logprobs, body.top_logprobs or 0, as_ids)
            logprobs = ChunkLogprobs(content=content, refusal=None)
        extra: dict[str, Any] = {"token_ids": output.token_ids} if body.return_token_ids else {}
        reply = self._replies[output.index]
        new = reply.push(output)
        chunks = []
        if new or logprobs or (body.return_token_ids and output.token_ids):
            delta = ChoiceDelta(content=new.content) if new.content or not new.calls else ChoiceDelta()
            if new.calls and body.functions is not None:
                call = new.calls[0]
                delta.function_call = ChoiceDeltaFunctionCall(arguments=call.arguments)
                if call.name is not None:
                    delta.function_call.name = call.name
            elif new.calls:
                delta.tool_calls = [_call_delta(call) for call in new.calls]
            chunks.append(
                ChunkChoice(index=output.index, delta=delta, logprobs=logprobs, finish_reason=None, **extra)
            )
        if output.finish_reason is not None:
            end: dict[str, Any] = {"stop_reason": output.stop_reason}
            chunks.append(
                ChunkChoice(
                    index=output.index,
                    delta=ChoiceDelta(),
                    logprobs=None,
                    finish_reason=self._reason(reply),
                    **end,
                )
            )
        return chunks

    def _event(self, choices: list[ChunkChoice], **extra: Any) -> bytes:
        options = self._options
        if options is not None and options.continuous_usage_stats:
            extra.setdefault("usage", self._usage())
        elif options is not None and options.include_usage:
            extra.setdefault("usage", None)
        chunk = ChatCompletionChunk.construct(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
            **extra,
        )
        return event(chunk.model_dump_json(exclude_unset=True))


def _text(message: Mapping[str, Any]) -> str:
    """What the assistant has said in ``message`` already, if it is the assistant's."""
    content = message.get("content") if message.get("role") == "assistant" else None
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def _call_delta(call: ToolCallDelta) -> ChoiceDeltaToolCall:
    function = ChoiceDeltaToolCallFunction(arguments=call.arguments)
    if call.name is None:
        return ChoiceDeltaToolCall(index=call.index, function=function)
    function.name = call.name
    return ChoiceDeltaToolCall(index=call.index, id=call.id, type="function", function=function)
