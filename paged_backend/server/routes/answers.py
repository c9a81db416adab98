"""Sending answers: server-sent events or one JSON body, each given up the moment its client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from paged_backend.remote.job import Job
from paged_backend.server.routes.serving import Serving
from paged_backend.server.wire.errors import ApiError, ClientGoneError, as_api_error
from paged_backend.server.wire.sse import DONE, event

logger = logging.getLogger("paged_backend.server")
T = TypeVar("T")


def json_answer(json: str, headers: dict[str, str] | None = None) -> Response:
    return Response(json, media_type="application/json", headers=headers)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(serving: Serving, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away or the time is up.

    Raises :class:`ClientGoneError`, or :class:`ApiError` 408.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait(
            {task, gone}, timeout=serving.config.request_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise timed_out(serving)
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.wait({task, gone})
        if not task.cancelled():
            task.exception()  # seen above, or of no interest to anybody any more


def timed_out(serving: Serving) -> ApiError:
    # a client that tried again would only add to the load that made it wait
    return ApiError(
        408,
        f"the request took longer than {serving.config.request_timeout:g} seconds",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


class EventStream(Response):
    """Sends what ``events`` yields, and leaves ``job`` (aborting it) at the end, an error, or when the client goes.

    on_error: renders an error in mid-stream. drop: closes the client's connection by force.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        serving: Serving,
        job: Job,
        events: AsyncIterator[bytes],
        on_error: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._serving = serving
        self._job = job
        self._events = events
        self._on_error = on_error or (lambda error: event(error.content.decode()) + DONE)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        stream = asyncio.ensure_future(self._stream(send))
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({stream, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not stream.done():
                raise ClientGoneError
            stream.result()
        finally:
            for task in (stream, gone):
                task.cancel()
            await asyncio.wait({stream, gone})
            if not stream.cancelled():
                stream.exception()
            self._job.__exit__()

    async def _stream(self, send: Any) -> None:
        patience = Patience(send, self._serving.config.slow_reader_timeout)
        await patience(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        loop = asyncio.get_running_loop()
        timeout = self._serving.config.request_timeout
        deadline = None if timeout is None else loop.time() + timeout
        events = self._events.__aiter__()
        try:
            while True:
                step = events.__anext__()
                try:
                    if deadline is None:
                        body = await step
                    else:
                        body = await asyncio.wait_for(step, max(deadline - loop.time(), 0.001))
                except StopAsyncIteration:
                    break
                await patience({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            if isinstance(error, ClientGoneError):
                raise
            told = (
                timed_out(self._serving) if isinstance(error, asyncio.TimeoutError) else as_api_error(error)
            )
            if told.status >= 500:
                logger.error(
                    "a stream ended in an error: %r", error, exc_info=self._serving.config.log_prompts
                )
            await patience({"type": "http.response.body", "body": self._on_error(told), "more_body": True})
        finally:
            with contextlib.suppress(Exception):
                await events.aclose()  # type: ignore[attr-defined]
        await patience({"type": "http.response.body", "body": b"", "more_body": False})


class Patience:
    """``send``, which raises :class:`ClientGoneError` when the client leaves it waiting for too long."""

    def __init__(self, send: Callable[[Any], Awaitable[None]], seconds: float) -> None:
        self._send = send
        self._seconds = seconds

    async def __call__(self, message: Any) -> None:
        task = asyncio.current_task()
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            if task is not None:
                task.cancel()

        timer = asyncio.get_running_loop().call_later(self._seconds, expire)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if expired:
                raise ClientGoneError from None
            raise
        finally:
            timer.cancel()
