"""``run`` of a batch in OpenAI's form: each line is a request of its API, answered by the server's own routes.

Nothing listens: the application is asked in this process. Lines are read as there is room for them and answers written
as they come, so a file of any length takes the memory of a few thousand requests.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from paged_backend.cli.arriving import Arriving
from paged_backend.cli.common import complain

if TYPE_CHECKING:
    from paged_backend.config import EngineConfig

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_FIELDS = ("custom_id", "method", "url", "body")
_NO_LIMIT = 1 << 40
LINES_AHEAD = 64
LOOK_EVERY = 0.1
"""Seconds between two looks at what has been read."""
Line = tuple[int, bytes]


def lines_of(source: BinaryIO) -> Iterator[Line]:
    """(number, line) of what is not empty."""
    return ((number, raw) for number, raw in enumerate(source, 1) if raw.strip())


def run_batch(
    config: EngineConfig,
    names: tuple[str, ...],
    lines: Iterator[Line],
    write: Callable[[Mapping[str, Any]], None],
    progress: bool,
) -> bool:
    """Answer every line; True if all are answered with status 200. names: of the model, as lines may call it.

    Raises MissingExtraError without the server's packages, and what keeps the model from being opened.
    """
    from paged_backend.errors import missing_extra
    from paged_backend.server.config import ServerConfig

    with missing_extra("server", "a batch of OpenAI's API"):
        from paged_backend.server.run.app import create_app

    # what arrives is bounded here, not by turning it away
    server = ServerConfig(
        served_model_names=names, in_process=True, max_waiting=_NO_LIMIT, max_body_bytes=_NO_LIMIT
    )
    return asyncio.run(_Batch(create_app(config, server), config.max_num_seqs, write, progress).run(lines))


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    request_id: str
    body: bytes


class _Batch:
    def __init__(
        self, app: Any, seats: int, write: Callable[[Mapping[str, Any]], None], progress: bool
    ) -> None:
        self._app = app
        self._room = asyncio.Semaphore(max(1024, 4 * seats))  # enough for the scheduler to choose from
        self._write = write
        self._good = True
        self._bar: Any = None
        if progress:
            from tqdm import tqdm

            self._bar = tqdm(total=0, desc="requests", unit="req", dynamic_ncols=True)

    async def run(self, lines: Iterator[Line]) -> bool:
        running: set[asyncio.Task[None]] = set()
        arriving = Arriving(lines, LINES_AHEAD)
        async with self._app.router.lifespan_context(self._app):
            try:
                while not arriving.ended:
                    for line in await asyncio.to_thread(arriving.take, LINES_AHEAD, LOOK_EVERY):
                        await self._room.acquire()
                        running.add(asyncio.create_task(self._answer(*line)))
                    done = {task for task in running if task.done()}
                    running -= done
                    await asyncio.gather(*done)  # a full disk ends the run
                await asyncio.gather(*running)
            finally:
                for task in running:
                    task.cancel()
                if self._bar is not None:
                    self._bar.close()
        if arriving.failure is not None:
            complain(f"the input broke off: {arriving.failure}")
        return self._good and arriving.failure is None

    async def _answer(self, number: int, raw: bytes) -> None:
        try:
            if self._bar is not None:
                self._bar.total += 1
            record = await self._record(number, raw)
            self._write(record)
            if self._bar is not None:
                self._bar.update(1)
        finally:
            self._room.release()

    async def _record(self, number: int, raw: bytes) -> dict[str, Any]:
        record: dict[str, Any] = {
            "id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None, "response": None, "error": None,
        }  # fmt: skip
        try:
            entry = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            record["custom_id"] = entry.get("custom_id") if isinstance(entry, dict) else None
            _check(entry)
        except ValueError as error:
            self._complain(number, str(error))
            record["error"] = {"code": "invalid_line", "message": f"line {number}: {error}"}
            return record
        answer = await _ask(self._app, entry["url"], json.dumps(entry["body"]).encode())
        body = json.loads(answer.body)
        record["response"] = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
        if answer.status != 200:
            self._complain(number, body["error"]["message"])
        return record

    def _complain(self, number: int, problem: str) -> None:
        self._good = False
        complain(f"line {number}: {problem}")


def _check(entry: Any) -> None:
    """Raise ValueError for a line that is no request of a batch."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, got {type(entry).__name__}")
    unknown = [name for name in entry if name not in _FIELDS]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; fields of the request go into 'body'")
    if not isinstance(entry.get("custom_id"), str) or not entry["custom_id"]:
        raise ValueError("'custom_id' must be text")
    if entry.get("method", "POST") != "POST":
        raise ValueError(f"'method' must be POST, got {entry['method']!r:.40}")
    if entry.get("url") not in URLS:
        raise ValueError(f"'url' must be one of {', '.join(URLS[:-1])}, got {entry.get('url')!r:.80}")
    if not isinstance(entry.get("body"), dict):
        raise ValueError("'body' must be an object")
    if entry["body"].get("stream"):
        raise ValueError("'stream' has no place in a batch: leave it out of 'body'")


async def _ask(app: Any, path: str, content: bytes) -> _Answer:
    """POST ``content`` to the application."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
        "client": None, "server": None,
    }  # fmt: skip
    asked = iter([{"type": "http.request", "body": content, "more_body": False}])
    parts: list[bytes] = []
    start: dict[str, Any] = {}

    async def receive() -> Any:
        for message in asked:
            return message
        await asyncio.Event().wait()  # this client never goes away

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    named = {name.lower(): value for name, value in start["headers"]}
    return _Answer(start["status"], named.get(b"x-request-id", b"").decode(), b"".join(parts))
