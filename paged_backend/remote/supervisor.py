"""Supervisor: keeps an engine behind the client. It starts it, watches it, and starts it again when it is lost.

Lost is: the process ended, its threads died, or no step was finished for ``stall_timeout`` while there was work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from paged_backend.errors import EngineClosedError, PagedBackendError
from paged_backend.remote.client import EngineClient
from paged_backend.remote.protocol import Message
from paged_backend.remote.transports import EngineLostError, Transport

logger = logging.getLogger("paged_backend.remote")
LONGEST_PAUSE = 30.0
"""Seconds between two attempts at starting the engine, at most."""


class Supervisor:
    """state: ``starting``, ``ok``, ``stalled``, ``restarting``, ``failed`` (it has given up) or ``closed``.

    max_restarts: failed starts in a row until it gives up; on_failed is called then. interval: seconds between two
    looks at the engine.
    """

    def __init__(
        self,
        transport: Transport,
        client: EngineClient,
        *,
        stall_timeout: float = 120.0,
        max_restarts: int = 5,
        interval: float = 1.0,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.transport = transport
        self.client = client
        self.state = "starting"
        self.restarts = 0
        self._stall_timeout = stall_timeout
        self._max_restarts = max_restarts
        self._interval = interval
        self._on_failed = on_failed
        self._ponged = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the engine and begin to watch it. Raises what kept it from opening."""
        try:
            hello = await self.transport.open(self._deliver)
        except BaseException:
            self.state = "failed"
            await self.transport.close(kill=True)
            raise
        self._up(hello)
        self._task = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """End the engine; what still runs gets an error."""
        self.state = "closed"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.client.give_up(EngineClosedError("the engine is shutting down"))
        await self.transport.close()

    def _up(self, hello: Message) -> None:
        self.state = "ok"
        self.client.engine_up(hello, self.transport.send)

    def _deliver(self, message: Message) -> None:
        if message["t"] == "pong":
            self._ponged = True
        self.client.receive(message)

    async def _supervise(self) -> None:
        while True:
            reason = await self._watch()
            logger.error("the engine was lost (%s); %d requests in flight", reason, self.client.in_flight)
            self.state = "restarting"
            self.client.engine_down()
            if not self.transport.restartable:
                self._give_up(reason)
                return
            await self.transport.close(kill=True)
            hello = await self._reopen()
            if hello is None:
                return
            self.restarts += 1
            self._up(hello)
            logger.warning("the engine is back; %d requests go on", self.client.in_flight)

    async def _reopen(self) -> Message | None:
        for attempt in range(self._max_restarts):
            if attempt:
                await asyncio.sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE))
            try:
                return await self.transport.open(self._deliver)
            except (EngineLostError, PagedBackendError, OSError) as error:
                logger.error("the engine did not start (attempt %d): %s", attempt + 1, error)
                await self.transport.close(kill=True)
        self._give_up(f"it did not start again in {self._max_restarts} attempts")
        return None

    def _give_up(self, reason: str) -> None:
        self.state = "failed"
        self.client.give_up(EngineClosedError(f"the engine is gone: {reason}"))
        self._on_failed()

    async def _watch(self) -> str:
        """Look at the engine until it is lost; returns how."""
        lost = asyncio.create_task(self.transport.lost())
        try:
            steps, quiet = -1, 0.0
            while True:
                self._ponged = False
                self.transport.send({"t": "ping"})
                done, _ = await asyncio.wait([lost], timeout=self._interval)
                if done:
                    return "its process ended"
                # counted in looks, not by the clock: a process that was itself suspended must not blame its engine
                stats = self.client.stats
                if self._ponged and stats["health"] in ("dead", "closed"):
                    return f"it is {stats['health']}"
                busy = bool(stats["num_running"] or stats["num_waiting"])
                if self._ponged and (not busy or stats["num_steps"] != steps):
                    quiet, steps, self.state = 0.0, stats["num_steps"], "ok"
                    continue
                quiet += self._interval
                if quiet >= self._stall_timeout:
                    if self.transport.restartable:
                        return f"it finished no step for {quiet:.0f} s"
                    self.state = "stalled"
        finally:
            lost.cancel()
