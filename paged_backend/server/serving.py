"""Serving: what every route of one server shares."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from paged_backend.config import EngineConfig
from paged_backend.server.client import EngineClient
from paged_backend.server.config import ServerConfig
from paged_backend.server.errors import ApiError
from paged_backend.server.metrics import Metrics
from paged_backend.server.supervisor import Supervisor


@dataclass
class Serving:
    """tokenizer: the model's own, in this process too, so that text and templates never burden the engine's."""

    config: ServerConfig
    engine_config: EngineConfig
    client: EngineClient
    supervisor: Supervisor
    metrics: Metrics
    tokenizer: Any = None
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

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
