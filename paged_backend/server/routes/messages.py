"""/v1/messages: Anthropic's API. A request becomes a chat like any other; only its shapes differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from paged_backend.server.routes.answers import EventStream, json_answer, unless_gone
from paged_backend.server.routes.prompts import chat_ids, open_chat
from paged_backend.server.routes.serving import Serving, serving_of
from paged_backend.server.wire.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    Prompt,
    answer_form,
    chat_messages,
    chat_tool_choice,
    chat_tools,
    error_body,
    template_variables,
)
from paged_backend.server.wire.errors import bad
from paged_backend.server.wire.message_events import MessageBuilder, message_id
from paged_backend.server.wire.replies import Reply
from paged_backend.server.wire.sampling import to_params
from paged_backend.server.wire.schema import body_of, read_body, refuse_given
from paged_backend.server.wire.sse import event
from paged_backend.toolcalls import reasoning_parser_for

router = APIRouter(tags=["Anthropic"])
_NOT_HERE = (
    "n", "stop", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "stream_options", "num_beams",
    "use_beam_search", "length_penalty", "early_stopping",
)  # fmt: skip


@router.post("/v1/messages", openapi_extra=body_of(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's Messages API. With ``stream``: its events."""
    serving = serving_of(request)
    body = await read_body(request, MessagesRequest)
    serving.check_model(body.model)
    refuse_given(body, _NOT_HERE)
    answer = await unless_gone(serving, request, _open(serving, body))
    request.state.job = answer.job  # for the log
    if body.stream:
        return EventStream(
            serving, answer.job, answer.events(), lambda error: event(error_body(error).decode(), "error")
        )
    with answer.job:
        return json_answer(await unless_gone(serving, request, answer.whole()))


@router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """How many tokens a message would have to answer."""
    serving = serving_of(request)
    body = await read_body(request, CountTokensRequest)
    serving.check_model(body.model)
    ids = await chat_ids(serving, **_chat(serving, body))
    return json_answer(f'{{"input_tokens":{len(ids)}}}')


async def _open(serving: Serving, body: MessagesRequest) -> MessageBuilder:
    choice, parallel = chat_tool_choice(body.tool_choice)
    params = to_params(
        body,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        structured_outputs=body.structured_outputs,
    )
    ids, call = await open_chat(
        serving,
        body,
        params=params,
        max_tokens=None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=answer_form(body),
        **_chat(serving, body),
    )
    left = serving.client.max_model_len - len(ids)
    params = replace(call.params, max_tokens=min(body.max_tokens, left))
    job = await serving.client.open([ids], params, body.cache_salt)
    reply = Reply(call.parser(), reasoning_parser_for(serving.tokenizer, ids))
    model = body.model or serving.name
    return MessageBuilder(job, reply, message_id(body.request_id), model, full=body.max_tokens > left)


def _chat(serving: Serving, body: Prompt) -> dict[str, Any]:
    """What the prompt is made of, as ``prepare_chat`` takes it."""
    messages = chat_messages(body)
    goes_on = messages[-1]["role"] == "assistant"  # the answer continues it
    if goes_on and messages[-1].get("tool_calls"):
        raise bad("messages", "must not end with a tool_use block: its tool_result must follow")
    none = (body.tool_choice or {}).get("type") == "none"
    return {
        "messages": messages,
        "tools": None if none else chat_tools(body.tools),
        "continue_final_message": goes_on,
        "chat_template_kwargs": template_variables(body, serving.tokenizer),
        "split_special_tokens": body.split_special_tokens is not False,
        "add_special_tokens": bool(getattr(body, "add_special_tokens", None)),
    }
