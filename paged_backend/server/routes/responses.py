"""/v1/responses: create and stream; text, function tools, JSON schemas. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from openai.types.responses import Response as OpenAIResponse
from starlette.responses import Response

from paged_backend.errors import RequestRejectedError
from paged_backend.server.routes.answers import EventStream, json_answer, unless_gone
from paged_backend.server.routes.prompts import open_chat
from paged_backend.server.routes.serving import Serving, serving_of
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.replies import Reply
from paged_backend.server.wire.response_events import ResponseBuilder
from paged_backend.server.wire.sampling import to_params
from paged_backend.server.wire.schema import ResponsesRequest, body_of, read_body
from paged_backend.server.wire.sse import event
from paged_backend.toolcalls import response_outputs

router = APIRouter(tags=["OpenAI"])
_NOT_HERE = (
    "n", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "stream_options", "num_beams",
    "use_beam_search", "length_penalty", "early_stopping",
)  # fmt: skip


@router.post("/v1/responses", openapi_extra=body_of(ResponsesRequest), response_model=OpenAIResponse)
async def create_response(request: Request) -> Response:
    """Answer an input in the form of the Responses API. With ``stream``: its typed events."""
    serving = serving_of(request)
    body = await read_body(request, ResponsesRequest)
    serving.check_model(body.model)
    for name in _NOT_HERE:
        if getattr(body, name) is not None:
            raise _bad(name, "is not supported by this route", "unsupported_parameter")
    answer = await unless_gone(serving, request, _open(serving, body))
    request.state.job = answer.job  # for the log
    if body.stream:
        return EventStream(
            serving,
            answer.job,
            answer.events(),
            lambda error: event(answer.failure(error).model_dump_json(), "error"),
        )
    with answer.job:
        response = await unless_gone(serving, request, answer.whole())
    return json_answer(response.model_dump_json(exclude_unset=True))


async def _open(serving: Serving, body: ResponsesRequest) -> ResponseBuilder:
    text = body.text or {}
    for name in text:
        if name != "format":
            raise _bad(f"text.{name}", "is not supported", "unsupported_parameter")
    structured: Any = body.structured_outputs
    if text.get("format") is not None:
        if structured is not None:
            raise _bad("text", "and structured_outputs exclude each other")
        try:
            structured = response_outputs(text["format"], "text.format")
        except RequestRejectedError as error:
            raise ApiError(400, str(error), param="text.format", code="invalid_value") from error
    scored = bool(body.include)
    if body.top_logprobs is not None and not scored:
        raise _bad("top_logprobs", "needs include: [message.output_text.logprobs]")
    params = to_params(
        body,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if scored else None,
        structured_outputs=structured,
    )
    ids, call = await open_chat(
        serving,
        body,
        _messages(body),
        params,
        body.max_output_tokens,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
    )
    base: dict[str, Any] = {
        "id": f"resp_{body.request_id or uuid.uuid4().hex}",
        "object": "response",
        "created_at": float(int(time.time())),
        "model": body.model or serving.name,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "text": {"format": text.get("format") or {"type": "text"}},
        "truncation": "disabled",
        "user": body.user,
    }
    job = await serving.client.open([ids], call.params, body.cache_salt)
    return ResponseBuilder(base, job, Reply(call.parser()), body.top_logprobs or 0)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as messages of a chat."""
    items: Sequence[Any] = (
        [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for number, item in enumerate(items):
        place, kind = f"input.{number}", item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(place, item.get("content"))})
        elif kind == "function_call":
            for name in ("call_id", "name", "arguments"):
                if not isinstance(item.get(name), str):
                    raise _bad(f"{place}.{name}", "must be text")
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(f"{place}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise _bad(f"{place}.type", f"{kind!r:.60} is not supported", "unsupported_parameter")
    return messages


def _content(place: str, content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise _bad(place, f"has a part of type {kind!r:.60}; this model takes only text")
        parts.append({"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")})
    return parts


def _bad(param: str, problem: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{param} {problem}", param=param, code=code)
