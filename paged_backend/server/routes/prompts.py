"""From messages or text to token ids, and how many more may follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.errors import ContextOverflowError, RequestRejectedError
from paged_backend.server.routes.serving import Serving
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.schema import Sampling
from paged_backend.toolcalls import chat_prompt as render_chat
from paged_backend.toolcalls import tool_format_for

_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
ROLES = ("system", "developer", "user", "assistant", "tool")
LONG_TEXT = 8192
"""Characters from which a text is encoded in a thread, so that other streams go on meanwhile."""


async def encode(serving: Serving, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) < LONG_TEXT:
        ids: list[int] = serving.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids
    return await serving.aside(serving.tokenizer.encode, text, add_special_tokens)


async def chat_prompt(serving: Serving, body: Any, tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
    """Token ids of ``body``'s messages (a ``Templating`` or ``TokenizeRequest``) by the model's chat template."""
    long = sum(len(str(message.get("content", ""))) for message in body.messages) >= LONG_TEXT
    made = await serving.aside(_render, serving, body, tools) if long else _render(serving, body, tools)
    ids: list[int] = made["prompt_token_ids"]
    return await encode(serving, made["prompt"], True) if body.add_special_tokens else ids


def _render(serving: Serving, body: Any, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    if body.continue_final_message and body.add_generation_prompt:
        raise _refused(
            "continue_final_message", "and add_generation_prompt exclude each other", "invalid_value"
        )
    if body.chat_template is not None and not serving.config.trust_request_chat_template:
        raise _refused(
            "chat_template",
            "in a request is a program, and this server does not run it: start the server with "
            "--trust-request-chat-template to allow it",
        )
    templates: dict[str, str] = serving.tokenizer.templates
    source = (templates.get("tool_use") if tools else None) or templates.get("default") or ""
    if body.chat_template is not None:
        source = templates.get(body.chat_template, body.chat_template)
    variables = dict(body.chat_template_kwargs or {})
    for name in _RESERVED & variables.keys():
        raise _refused("chat_template_kwargs", f"must not have {name!r}", "invalid_value")
    for name in ("documents", "reasoning_effort"):
        value = getattr(body, name, None)
        if value is not None:
            if name not in source:
                raise _refused(name, "is not supported: this model's chat template does not know it")
            variables[name] = value
    return render_chat(
        serving.tokenizer,
        _messages(body.messages, knows_developer="developer" in source),
        tools,
        tool_format_for(serving.tokenizer),
        add_generation_prompt=False if body.continue_final_message else body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        **variables,
    )


def _refused(name: str, problem: str, code: str = "unsupported_parameter") -> ApiError:
    return ApiError(400, f"{name} {problem}", param=name, code=code)


def _messages(messages: Sequence[Mapping[str, Any]], knows_developer: bool) -> list[dict[str, Any]]:
    """Checked copies, fit for a template."""
    if not messages:
        raise ApiError(400, "messages must have at least one message", param="messages", code="invalid_value")
    checked = []
    for number, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise _bad(number, "role", f"must be one of {', '.join(ROLES)}, got {role!r:.60}")
        content = message.get("content")
        if content is None:
            if role != "assistant" or not (message.get("tool_calls") or message.get("refusal")):
                raise _bad(number, "content", "is missing")
        elif isinstance(content, list):
            _check_parts(number, content)
        elif not isinstance(content, str):
            raise _bad(number, "content", f"must be text or a list of parts, got {type(content).__name__}")
        if role == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise _bad(number, "tool_call_id", "is missing: a tool message must name the call it answers")
        _check_calls(number, message.get("tool_calls"))
        if role == "developer" and not knows_developer:
            message = {**message, "role": "system"}
        checked.append(dict(message))
    return checked


def _check_parts(number: int, parts: Sequence[Any]) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal"):
            raise _bad(number, "content", f"has a part of type {kind!r:.60}; this model takes only text")
        if not isinstance(part.get(kind), str):
            raise _bad(number, "content", f"has a {kind} part without its text")


def _check_calls(number: int, calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise _bad(number, "tool_calls", "must be a list")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _bad(number, "tool_calls", "must be objects with a function that has a name")


def _bad(number: int, name: str, problem: str) -> ApiError:
    place = f"messages.{number}.{name}"
    return ApiError(400, f"{place} {problem}", param=place, code="invalid_value")


def fit_prompt(serving: Serving, body: Sampling, ids: list[int], max_tokens: int | None) -> list[int]:
    """``ids``, cut as ``truncate_prompt_tokens`` says. Raises if they and ``max_tokens`` more exceed the context."""
    limit = serving.client.max_model_len
    keep = body.truncate_prompt_tokens
    if keep is None:
        if body.truncation_side is not None:
            raise ApiError(
                400,
                "truncation_side needs truncate_prompt_tokens",
                param="truncation_side",
                code="invalid_value",
            )
    else:
        if keep == 0:
            raise ApiError(
                400, "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens",
                code="invalid_value",
            )  # fmt: skip
        keep = max(limit - (max_tokens or 1), 1) if keep < 0 else keep
        if len(ids) > keep:
            ids = ids[:keep] if body.truncation_side == "right" else ids[-keep:]
    if not ids:
        raise RequestRejectedError("the prompt is empty: give at least one token")
    if len(ids) + (max_tokens or 1) > limit:
        wanted = (
            f" and {max_tokens} new ones are asked for"
            if max_tokens
            else " and there must be room for a new one"
        )
        raise ContextOverflowError(
            f"the prompt has {len(ids)} tokens{wanted}, which exceeds the context window: this model's maximum context "
            f"length is {limit} tokens"
        )
    return ids


def default_max_tokens(serving: Serving, ids: Sequence[int], min_tokens: int | None) -> int:
    """For chats that do not say: the model's own default, else all that the context leaves."""
    left = serving.client.max_model_len - len(ids)
    wanted = serving.client.generation_config.get("max_new_tokens")
    return left if wanted is None else min(max(int(wanted), min_tokens or 0), left)
