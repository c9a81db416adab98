"""ApiError: everything that goes wrong, in the shape and with the codes of OpenAI's API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paged_backend.errors import (
    ContextOverflowError,
    EngineClosedError,
    PagedBackendError,
    RequestAbortedError,
)
from paged_backend.remote.client import QueueFullError
from paged_backend.sampling_params import SamplingParams

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_FIELDS = frozenset(
    (
        "chat_template", "chat_template_kwargs", "continue_final_message", "messages", "prompt", "response_format",
        "suffix", "tool_choice", "tools", *(field.name for field in fields(SamplingParams)),
    )
)  # fmt: skip


class ApiError(Exception):
    """status: of HTTP. param: the field that is wrong. code: one of OpenAI's where it has one for the case."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()


class ClientGoneError(Exception):
    """The client has closed its connection: there is nobody to answer."""


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of ``error``. Unexpected ones say nothing of themselves but their kind."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflowError):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), code="queue_full", headers=wait)
    if isinstance(error, (EngineClosedError, RequestAbortedError)):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "5"})
    if isinstance(error, ValueError):
        text = str(error)
        return ApiError(400, text, param=named_field(text), code="invalid_value")
    if isinstance(error, PagedBackendError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, f"internal error ({type(error).__name__})", code="internal_error")


def named_field(message: str) -> str | None:
    """The field that a message begins with, as in ``top_p must be in (0, 1]`` or ``messages.2.content is missing``."""
    found = re.match(r"([a-z_]+)(\.\d+[a-z_.]*)?", message)
    return found[0] if found is not None and found[1] in _FIELDS else None


def bad(place: str, problem: str, code: str = "invalid_value") -> ApiError:
    """A 400 that begins with the field it is about."""
    return ApiError(400, f"{place} {problem}", param=place, code=code)
