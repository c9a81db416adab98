"""From messages or text to token ids, and how many more may follow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from paged_backend.errors import ContextOverflowError, RequestRejectedError
from paged_backend.sampling_params import SamplingParams
from paged_backend.server.routes.serving import Serving
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.schema import Sampling
from paged_backend.toolcalls import ChatCall, chat_prompt, prepare_chat

T = TypeVar("T")
LONG_TEXT = 8192
"""Characters from which a text is encoded in a thread, so that other streams go on meanwhile."""


async def encode(
    serving: Serving, text: str, add_special_tokens: bool, split_special_tokens: bool = False
) -> list[int]:
    if len(text) < LONG_TEXT:
        ids: list[int] = serving.tokenizer.encode(text, add_special_tokens, split_special_tokens)
        return ids
    return await serving.aside(serving.tokenizer.encode, text, add_special_tokens, split_special_tokens)


async def open_chat(
    serving: Serving,
    body: Sampling,
    messages: Sequence[Any],
    params: SamplingParams,
    max_tokens: int | None,
    **options: Any,
) -> tuple[list[int], ChatCall]:
    """(ids of the prompt, cut as ``body`` says; the chat, whose params say how many tokens may follow it).

    options: those of ``prepare_chat``. max_tokens: as the client gave it. Raises what ``fit_prompt`` and
    ``prepare_chat`` raise.
    """
    call = await _maybe_aside(
        serving,
        messages,
        functools.partial(prepare_chat, serving.tokenizer, messages, params, **options),
    )
    ids = fit_prompt(serving, body, call.prompt["prompt_token_ids"], max_tokens)
    most = max_tokens or default_max_tokens(serving, ids, body.min_tokens)
    return ids, replace(call, params=replace(call.params, max_tokens=most))


async def chat_ids(serving: Serving, messages: Sequence[Any], **options: Any) -> list[int]:
    """Token ids of a chat that is not going to be answered. options: those of ``chat_prompt``."""
    prompt = await _maybe_aside(
        serving, messages, functools.partial(chat_prompt, serving.tokenizer, messages, **options)
    )
    ids: list[int] = prompt["prompt_token_ids"]
    return ids


async def _maybe_aside(serving: Serving, messages: Sequence[Any], function: Callable[[], T]) -> T:
    long = sum(len(str(message.get("content", ""))) for message in messages) >= LONG_TEXT
    return await serving.aside(function) if long else function()


def template_options(serving: Serving, body: Any) -> dict[str, Any]:
    """What a ``Templating`` or ``TokenizeRequest`` says of the chat template, as options of ``chat_prompt``."""
    if body.chat_template is not None and not serving.config.trust_request_chat_template:
        raise _refused(
            "chat_template",
            "in a request is a program, and this server does not run it: start the server with "
            "--trust-request-chat-template to allow it",
        )
    variables = dict(body.chat_template_kwargs or {})
    for name in ("documents", "reasoning_effort"):
        value = getattr(body, name, None)
        known = name in serving.tokenizer.template_source(body.chat_template, bool(body.tools))
        if value is not None and (known or name == "documents"):
            if not known:
                raise _refused(name, "is not supported: this model's chat template does not know it")
            variables[name] = value
    return {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": bool(body.continue_final_message),
        "chat_template": body.chat_template,
        "chat_template_kwargs": variables,
        "split_special_tokens": body.split_special_tokens is not False,
        "add_special_tokens": bool(body.add_special_tokens),
    }


def _refused(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{name} {problem}", param=name, code="unsupported_parameter")


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
