"""/v1/responses: create, go on from an earlier one, retrieve, delete. What is kept is kept in memory."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from openai.types.responses import Response as OpenAIResponse
from pydantic_core import from_json

from paged_backend.errors import ContextOverflowError, RequestRejectedError
from paged_backend.server.routes.answers import EventStream, json_answer, unless_gone
from paged_backend.server.routes.prompts import open_chat
from paged_backend.server.routes.serving import Serving, serving_of
from paged_backend.server.store import StoredResponse, UnknownResponseError
from paged_backend.server.wire.errors import ApiError, bad
from paged_backend.server.wire.replies import Reply
from paged_backend.server.wire.response_events import ResponseBuilder
from paged_backend.server.wire.response_items import chat_messages, input_items, without_oldest_turns
from paged_backend.server.wire.sampling import to_params
from paged_backend.server.wire.schema import ResponsesRequest, body_of, read_body, refuse_given
from paged_backend.server.wire.sse import json_text
from paged_backend.toolcalls import ChatCall, reasoning_options, reasoning_parser_for, response_outputs

router = APIRouter(tags=["OpenAI"])
_NOT_HERE = (
    "n", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "num_beams", "use_beam_search",
    "length_penalty", "early_stopping",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


@router.post("/v1/responses", openapi_extra=body_of(ResponsesRequest), response_model=OpenAIResponse)
async def create_response(request: Request) -> Response:
    """Answer an input in the form of the Responses API. With ``stream``: its typed events."""
    serving = serving_of(request)
    body = await read_body(request, ResponsesRequest)
    serving.check_model(body.model)
    refuse_given(body, _NOT_HERE)
    answer = await unless_gone(serving, request, _open(serving, body))
    request.state.job = answer.job  # for the log
    if body.stream:
        return EventStream(serving, answer.job, answer.events(), answer.failure)
    with answer.job:
        return json_answer(await unless_gone(serving, request, answer.whole()))


@router.get("/v1/responses/{index}", response_model=OpenAIResponse)
async def retrieve_response(index: str, request: Request) -> Response:
    """A response that is kept."""
    _check_query(request, "include")
    return json_answer(_kept(serving_of(request), index).body.decode())


@router.delete("/v1/responses/{index}")
async def delete_response(index: str, request: Request) -> Response:
    """Keep it no longer; those that follow it lose their beginning."""
    serving = serving_of(request)
    _kept(serving, index)
    serving.responses.delete(index)
    return JSONResponse({"id": index, "object": "response", "deleted": True})


@router.get("/v1/responses/{index}/input_items")
async def list_input_items(index: str, request: Request) -> Response:
    """What it was given; not what it has from the response before it."""
    _check_query(request, "include", "after", "limit", "order")
    items = from_json(_kept(serving_of(request), index).items)
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise bad("order", f"must be asc or desc, got {order!r:.60}")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
        raise bad("limit", f"must be in [1, 100], got {limit!r:.60}")
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad("after", f"must be the id of an item, got {after!r:.80}")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(page) < len(items)})


def _check_query(request: Request, *known: str) -> None:
    for name in request.query_params:
        if name.removesuffix("[]") not in known:
            raise bad(name[:80], "is not supported by this route", "unsupported_parameter")


def _kept(serving: Serving, index: str) -> StoredResponse:
    return _chain(serving, index)[-1]


def _chain(serving: Serving, index: str, param: str | None = None) -> list[StoredResponse]:
    """The conversation that ends with a response, oldest first. Raises :class:`ApiError` 404."""
    kept = serving.responses
    try:
        return kept.chain(index) if param is not None else [kept.get(index)]
    except UnknownResponseError as error:
        lost = error.args[0]
        which = (
            f"response {index[:80]!r}"
            if lost == index
            else f"response {lost!r}, which {index[:80]!r} follows,"
        )
        raise ApiError(
            404,
            f"{which} is not here: this server keeps the last {kept.most} responses ({kept.most_bytes} bytes) while it "
            "runs, unless store is false; send the whole conversation as input, or see --max-stored-responses",
            param=param,
            code="response_not_found" if param is None else "previous_response_not_found",
        ) from None


async def _open(serving: Serving, body: ResponsesRequest) -> ResponseBuilder:
    text, reasoning = body.text or {}, body.reasoning or {}
    structured: Any = body.structured_outputs
    options = body.stream_options
    if options is not None and (options.include_usage or options.continuous_usage_stats):
        raise bad(
            "stream_options",
            "is not supported by this route: usage comes with the end",
            "unsupported_parameter",
        )
    if text.get("format") is not None and structured is not None:
        raise bad("text", "and structured_outputs exclude each other")
    for name, value in text.items():
        if name != "format" and (name, value) != ("verbosity", "medium"):
            raise bad(f"text.{name}", "is not supported", "unsupported_parameter")
    for name, value in reasoning.items():
        if name != "effort" and (name, value) not in (("summary", "auto"), (name, None)):
            raise bad(f"reasoning.{name}", "is not supported", "unsupported_parameter")
    scored = _LOGPROBS in (body.include or ())
    if body.top_logprobs is not None and not scored:
        raise bad("top_logprobs", f"needs include: [{_LOGPROBS}]")
    index = f"resp_{body.request_id or uuid.uuid4().hex}"
    keeps = body.store is not False
    if keeps and index in serving.responses:
        raise bad("request_id", "is that of a response that is kept already")
    if not body.input:
        raise bad("input", "must have at least one item")
    items = input_items(body.input)
    if text.get("format") is not None:
        try:
            structured = response_outputs(text["format"], "text.format")
        except RequestRejectedError as error:
            raise bad("text.format", str(error).removeprefix("text.format ")) from error
    params = to_params(
        body,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if scored else None,
        structured_outputs=structured,
    )
    ids, call = await _fitting(serving, body, _messages(serving, body, items), params=params)
    base: dict[str, Any] = {
        "id": index,
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model or serving.name,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": keeps,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "text": {"format": text.get("format") or {"type": "text"}},
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    job = await serving.client.open([ids], call.params, body.cache_salt)
    reply = Reply(call.parser(), reasoning_parser_for(serving.tokenizer, ids))
    keep = functools.partial(_keep, serving, body, index, items) if keeps else lambda made: None
    return ResponseBuilder(base, job, reply, body.top_logprobs or 0, keep)


def _keep(
    serving: Serving, body: ResponsesRequest, index: str, items: Sequence[Mapping[str, Any]], made: str
) -> None:
    given = json_text(items).encode()
    serving.responses.put(StoredResponse(index, made.encode(), given, body.previous_response_id))


def _messages(
    serving: Serving, body: ResponsesRequest, items: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Instructions, what came before, and the input, as messages of a chat."""
    before: list[Mapping[str, Any]] = []
    if body.previous_response_id is not None:
        for kept in _chain(serving, body.previous_response_id, "previous_response_id"):
            before += [*from_json(kept.items), *from_json(kept.body)["output"]]
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    return instructions + chat_messages([*before, *items])


async def _fitting(
    serving: Serving, body: ResponsesRequest, messages: Sequence[Mapping[str, Any]], **given: Any
) -> tuple[list[int], ChatCall]:
    """The prompt and the chat; with ``truncation: auto`` without as many of the first turns as there is no room for."""
    open_it = functools.partial(
        open_chat,
        serving,
        body,
        max_tokens=body.max_output_tokens,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=_template_variables(serving, body),
        split_special_tokens=body.split_special_tokens is not False,
        add_special_tokens=bool(body.add_special_tokens),
        **given,
    )
    try:
        return await open_it(messages=messages)
    except ContextOverflowError:
        shorter = without_oldest_turns(messages) if body.truncation == "auto" else []
        if not shorter:
            raise
    low, high = 0, len(shorter) - 1
    while low < high:  # the fewest turns that have to go
        middle = (low + high) // 2
        try:
            await open_it(messages=shorter[middle])
            high = middle
        except ContextOverflowError:
            low = middle + 1
    return await open_it(messages=shorter[low])


def _template_variables(serving: Serving, body: ResponsesRequest) -> dict[str, Any]:
    effort = (body.reasoning or {}).get("effort")
    wanted, level = (False, None) if effort == "none" else (None, effort)
    try:
        options = reasoning_options(serving.tokenizer, wanted, level, "reasoning.effort")
    except RequestRejectedError as error:
        raise bad(
            "reasoning.effort", str(error).removeprefix("reasoning.effort "), "unsupported_parameter"
        ) from error
    return {**options, **(body.chat_template_kwargs or {})}
