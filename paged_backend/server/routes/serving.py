"""Serving: what every route of one server shares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from paged_backend.config import EngineConfig
from paged_backend.remote.client import EngineClient
from paged_backend.remote.supervisor import Supervisor
from paged_backend.server.config import ServerConfig
from paged_backend.server.metrics import Metrics
from paged_backend.server.store import ResponseStore
from paged_backend.server.wire.errors import ApiError

T = TypeVar("T")


@dataclass
class Serving:
    """tokenizer: the model's own, in this process too, so that text and templates never burden the engine's."""

    config: ServerConfig
    engine_config: EngineConfig
    client: EngineClient
    supervisor: Supervisor
    metrics: Metrics
    responses: ResponseStore
    tokenizer: Any = None
    draining: bool = False
    lanes: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "paged_backend-text"))
    """For long texts. Two threads and no more: each keeps the memory that its largest text has taken."""
    created: int = field(default_factory=lambda: int(time.time()))

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` in a thread, so that the streams go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.lanes, function, *args)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.config.served_model_names) or (self.engine_config.model,)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def health(self) -> str:
        """``ok`` only if a request sent now would be computed now."""
        state = self.supervisor.state
        return state if state != "ok" else self.client.stats.get("health", "ok")

    def check_model(self, asked: str | None) -> None:
        """Raise :class:`ApiError` 404 if a request names another model."""
        if asked is not None and asked not in self.names:
            raise ApiError(
                404,
                f"the model {asked[:200]!r} does not exist; this server has {', '.join(map(repr, self.names))}",
                param="model",
                code="model_not_found",
            )


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving
