"""Transports: where the engine runs. A process is started for it (:class:`ProcessTransport`), or this one is used."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

from paged_backend.config import EngineConfig
from paged_backend.errors import ModelLoadError, PagedBackendError
from paged_backend.remote.line import start_with_line
from paged_backend.remote.protocol import HEADER, Message, pack, unpack

Deliver = Callable[[Message], None]
CLOSE_TIMEOUT = 10.0
"""Seconds an engine process gets to end by itself."""


class EngineLostError(PagedBackendError):
    """The engine process ended, or closed its line."""


class Transport(Protocol):
    """restartable: whether :meth:`open` may be called again after :meth:`close`."""

    restartable: bool

    async def open(self, deliver: Deliver) -> Message:
        """Start an engine and return its hello; from then on ``deliver`` gets what it says, in the event loop."""

    def send(self, message: Message) -> None: ...

    async def lost(self) -> None:
        """Return when the engine is gone."""

    async def close(self, kill: bool = False) -> None: ...


class ProcessTransport:
    """command: what starts the engine process; an argument for ``own_line`` is added. log_format: of its log."""

    restartable = True

    def __init__(self, config: EngineConfig, command: tuple[str, ...] = (), log_format: str = "text") -> None:
        self._config = config
        self._log_format = log_format
        self._command = command or (sys.executable, "-m", "paged_backend.remote.worker")
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while there is one."""
        return self._process.pid if self._process is not None else None

    async def open(self, deliver: Deliver) -> Message:
        self._process, ours = await start_with_line(self._command)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(
            pack({"t": "open", "config": asdict(self._config), "log_format": self._log_format})
        )
        try:
            hello = await _receive(reader)
        except EngineLostError:
            code = await self._process.wait()
            raise EngineLostError(
                f"the engine process ended with status {code} before it was ready"
            ) from None
        if hello["t"] == "failed":
            raise ModelLoadError(hello["message"])
        self._reading = asyncio.create_task(_read(reader, deliver))
        return hello

    def send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def lost(self) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def close(self, kill: bool = False) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            self._reading = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        process, self._process = self._process, None
        if process is None:
            return
        if not kill:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _read(reader: asyncio.StreamReader, deliver: Deliver) -> None:
    with contextlib.suppress(EngineLostError):
        while True:
            deliver(await _receive(reader))


async def _receive(reader: asyncio.StreamReader) -> Message:
    try:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EngineLostError("the line to the engine was closed") from error


class LocalTransport:
    """The engine in this process. make: opens it, in a thread; close: ends this use of it."""

    restartable = False

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lane = ThreadPoolExecutor(
            1, "paged_backend-local"
        )  # one thread, so that messages keep their order
        self._ended = asyncio.Event()
        self._session: Any = None
        self._deliver: Deliver | None = None

    async def open(self, deliver: Deliver) -> Message:
        from paged_backend.remote.session import EngineSession

        loop = asyncio.get_running_loop()
        engine = await loop.run_in_executor(self._lane, self._make)

        def send(message: Message) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody listens
                loop.call_soon_threadsafe(deliver, message)

        self._session = EngineSession(engine, send)
        hello: Message = self._session.hello()
        return hello

    def send(self, message: Message) -> None:
        self._lane.submit(self._session.handle, message)

    async def lost(self) -> None:
        await self._ended.wait()

    async def close(self, kill: bool = False) -> None:
        self._ended.set()
        if self._session is not None:
            session, self._session = self._session, None
            await asyncio.get_running_loop().run_in_executor(None, session.close)
            await asyncio.get_running_loop().run_in_executor(None, session.engine.close)
        self._lane.shutdown(wait=False)
