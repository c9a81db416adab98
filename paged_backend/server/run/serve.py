"""Running the application: uvicorn, signals, draining, exit status."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from paged_backend.config import EngineConfig
from paged_backend.logs import set_up_logging
from paged_backend.server.config import ServerConfig
from paged_backend.server.routes.serving import Serving
from paged_backend.server.run.app import create_app, open_serving
from paged_backend.server.run.listening import url_of

logger = logging.getLogger("paged_backend.server")


class Connections:
    """The open connections by the address of their client, so that one can be closed by force."""

    def __init__(self) -> None:
        self._open: dict[Any, asyncio.Transport] = {}

    def drop(self, client: Any) -> None:
        """Close the connection of ``client`` at once, whatever is still to be sent."""
        transport = self._open.get(tuple(client)) if client else None
        if transport is not None:
            transport.abort()

    def protocol(self) -> type[asyncio.Protocol]:
        """uvicorn's protocol, which keeps this book."""
        connections = self._open

        class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen by what is installed
            def connection_made(self, transport: asyncio.Transport) -> None:
                super().connection_made(transport)
                connections[_peer(transport)] = transport
                self._booked = _peer(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                connections.pop(self._booked, None)
                super().connection_lost(exc)

        return Protocol


def _peer(transport: asyncio.Transport) -> Any:
    peer = transport.get_extra_info("peername")
    return tuple(peer[:2]) if isinstance(peer, (tuple, list)) else id(transport)


class DrainingServer(uvicorn.Server):
    """At the first signal new requests get a 503 while running ones finish; at the second everything stops."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self._serving.draining:
            self.force_exit = True
            self.should_exit = True
            return
        self._serving.draining = True
        self._loop.call_soon_threadsafe(self._begin)

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def _begin(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        client, waited = self._serving.client, 0.0
        longest = self._serving.config.drain_timeout
        if client.in_flight:
            logger.info(
                "shutting down: %d requests may finish within %g s; Ctrl-C again stops at once",
                client.in_flight,
                longest,
            )
        else:
            logger.info("shutting down")
        while client.in_flight and waited < longest and not self.should_exit:
            await asyncio.sleep(0.05)
            waited += 0.05
        if client.in_flight:
            logger.warning("%d requests are cut off", client.in_flight)
        self.should_exit = True


def serve(engine_config: EngineConfig, config: ServerConfig, sockets: Sequence[socket.socket]) -> int:
    """Serve until a signal comes; returns the exit status: 0, or 1 if the engine is gone for good.

    sockets: of ``config``'s address, from ``listening.listen``; clients that connect while the model is loaded wait.
    Raises what kept the model from being opened.
    """
    set_up_logging(config.log_format)
    connections = Connections()
    failed = False

    def on_failed() -> None:
        nonlocal failed
        failed = True
        server.should_exit = True

    app = create_app(engine_config, config, drop=connections.drop, on_failed=on_failed)
    # the engine is opened and closed here; a lifespan that is cut off by a second signal would log a traceback
    server = DrainingServer(uvicorn_config(app, config, connections, lifespan="off"), app.state.serving)
    asyncio.run(_run(server, app.state.serving, sockets))
    return 1 if failed or not server.started else 0


async def _run(server: DrainingServer, serving: Serving, sockets: Sequence[socket.socket]) -> None:
    logger.info("loading %s", serving.engine_config.model)
    await open_serving(serving)
    try:
        logger.info("%s is served at %s/v1", serving.name, url_of(serving.config.host, sockets[0]))
        await server.serve(list(sockets))
    finally:
        await serving.supervisor.close()


def uvicorn_config(
    app: FastAPI, config: ServerConfig, connections: Connections, lifespan: Literal["on", "off"] = "on"
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=connections.protocol(),
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
