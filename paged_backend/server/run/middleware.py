"""RequestMiddleware: what every request passes before a route sees it (id, key, size, draining), and its log line."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from paged_backend.remote.job import Job
from paged_backend.server.routes.serving import Serving
from paged_backend.server.run.auth import ApiKeys
from paged_backend.server.wire.anthropic import error_body, speaks_anthropic
from paged_backend.server.wire.errors import ApiError, ClientGoneError, as_api_error

logger = logging.getLogger("paged_backend.server")
OPEN_ROUTES = ("/health", "/ping")
ALWAYS = ("/health", "/ping", "/ready", "/load", "/metrics", "/stats", "/version")
"""Answered while the server drains."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_GONE = 499  # what nginx logs for a client that closed the connection


class RequestMiddleware:
    """ASGI middleware, outermost. drop: closes a client's connection by force, given its address."""

    def __init__(self, app: Any, serving: Serving, drop: Callable[[Any], None] = lambda client: None) -> None:
        self._app = app
        self._serving = serving
        self._keys = ApiKeys(serving.config.api_keys)
        self._drop = drop

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        await _Passage(self, scope, receive, send).run()

    def check(self, scope: Any, headers: dict[bytes, bytes]) -> None:
        """Raise :class:`ApiError` for what must not reach a route."""
        path = scope["path"]
        named = (headers.get(b"authorization"), headers.get(b"x-api-key"))
        given, key = (None if value is None else value.decode("latin-1") for value in named)
        if path not in OPEN_ROUTES and not self._keys.admits(given, key):
            # a browser that opens a page is asked for the key, as the password of any user
            browser = scope["method"] == "GET" and b"text/html" in headers.get(b"accept", b"")
            how = 'Basic realm="paged_backend: the API key is the password"' if browser else "Bearer"
            problem = "no API key was given" if given is key is None else "the API key is not valid"
            hint = "send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(
                401, f"{problem}: {hint}", code="invalid_api_key", headers={"WWW-Authenticate": how}
            )
        if self._serving.draining and path not in ALWAYS:
            wait = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=wait)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._serving.config.max_body_bytes:
            raise too_large(self._serving)


def too_large(serving: Serving) -> ApiError:
    # what is left of the body is not read: the connection cannot be used again
    return ApiError(
        413,
        f"the request body is longer than {serving.config.max_body_bytes} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )


class _Passage:
    """One request."""

    def __init__(self, middleware: RequestMiddleware, scope: Any, receive: Any, send: Any) -> None:
        self._middleware = middleware
        self._serving = middleware._serving
        self._scope = scope
        self._receive_raw = receive
        self._send_raw = send
        self._received = 0
        self._status = 0
        self._begun = time.monotonic()
        self._headers = {name.lower(): value for name, value in scope["headers"]}
        self._anthropic = speaks_anthropic(scope["path"], self._headers)
        given = self._headers.get(b"x-request-id", b"").decode("latin-1")
        self._id = given if _ID.fullmatch(given) else uuid.uuid4().hex

    async def run(self) -> None:
        try:
            self._middleware.check(self._scope, self._headers)
            await self._middleware._app(self._scope, self._receive, self._send)
        except ClientGoneError:
            if self._status == 0:
                self._status = _GONE
            self._middleware._drop(self._scope.get("client"))
        except Exception as error:
            await self._fail(error)
        finally:
            self._log()

    async def _receive(self) -> Any:
        message = await self._receive_raw()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            if self._received > self._serving.config.max_body_bytes:
                raise too_large(self._serving)
        return message

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            names = (b"x-request-id", b"request-id") if self._anthropic else (b"x-request-id",)
            told = [(name, self._id.encode("latin-1")) for name in names]
            message["headers"] = [*message.get("headers", ()), *told]
        await self._send_raw(message)

    async def _fail(self, error: Exception) -> None:
        told = as_api_error(error)
        if told.status >= 500 and not isinstance(error, ApiError):
            logger.error(
                "request %s failed: %s", self._id, error if self._serving.config.log_prompts else type(error).__name__,
                exc_info=self._serving.config.log_prompts,
            )  # fmt: skip
        if self._status:
            return  # the answer had begun; it ends here, and the client sees that it is not complete
        body = error_body(told, self._id) if self._anthropic else told.content
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in told.headers.items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": told.status, "headers": headers})
        await self._send_raw({"type": "http.response.body", "body": body})

    def _log(self) -> None:
        route = getattr(self._scope.get("route"), "path", None) or "other"
        self._serving.metrics.http(route, self._status)
        if self._scope["path"] in ALWAYS:
            return  # asked every second by probes and by the page
        # a path that is there is one of this server's own; what else a client asked for does not get into the log
        shown = self._scope["path"] if self._status < 400 else route
        logger.info(
            "%s %s %d", self._scope["method"], shown, self._status,
            extra={"fields": {
                "event": "request", "method": self._scope["method"], "route": route, "status": self._status,
                "request_id": self._id, "seconds": round(time.monotonic() - self._begun, 4),
                **self._about_job(),
            }},
        )  # fmt: skip

    def _about_job(self) -> dict[str, Any]:
        job: Job | None = self._scope.get("state", {}).get("job")
        if job is None:
            return {}
        fields: dict[str, Any] = {
            "prompt_tokens": job.prompt_tokens,
            "cached_tokens": job.cached_tokens,
            "output_tokens": job.output_tokens,
        }
        first = job.requests[0]
        if first.first_token is not None:
            fields["first_token_seconds"] = round(first.first_token - first.arrival, 4)
        if self._serving.config.log_prompts:
            decode = self._serving.tokenizer.decode
            fields["prompts"] = [decode(remote.prompt_token_ids, False) for remote in job.requests]
        return fields
