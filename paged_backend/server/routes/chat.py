"""/v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from openai.types.chat import ChatCompletion

from paged_backend.server.routes.answers import EventStream, json_answer, unless_gone
from paged_backend.server.routes.prompts import open_chat, template_options
from paged_backend.server.routes.serving import Serving, serving_of
from paged_backend.server.wire.chat_events import ChatBuilder
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.formats import own_form
from paged_backend.server.wire.legacy import modern
from paged_backend.server.wire.sampling import check_listed, to_params
from paged_backend.server.wire.schema import ChatRequest, body_of, read_body

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
        return json_answer(await unless_gone(serving, request, answer.whole()))


async def _open(serving: Serving, body: ChatRequest) -> ChatBuilder:
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
    job = await serving.client.open([ids], call.params, body.cache_salt)
    return ChatBuilder(body, body.model or serving.name, job, call)
