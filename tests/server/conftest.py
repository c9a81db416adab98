"""Servers on real ports, over a tiny random model, for tests that talk to them as clients do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")
import httpx2 as httpx
import openai
from waiting import wait_until

from paged_backend.engine.engine import Engine
from paged_backend.testing import StepGate


class RunningServer:
    """An application behind uvicorn in a thread of this process."""

    def __init__(self, engine_options: dict[str, Any], server_options: dict[str, Any], **given: Any) -> None:
        from paged_backend.config import EngineConfig
        from paged_backend.server.config import ServerConfig
        from paged_backend.server.run.app import create_app
        from paged_backend.server.run.serve import Connections, DrainingServer, uvicorn_config

        config = ServerConfig(port=0, **server_options)
        connections = Connections()
        self.failed = threading.Event()
        app = create_app(
            EngineConfig(**engine_options), config, drop=connections.drop, on_failed=self.failed.set, **given
        )
        self.serving = app.state.serving
        self.server = DrainingServer(uvicorn_config(app, config, connections), self.serving)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.started or not self.thread.is_alive(), 120)
        if not self.server.started:
            raise RuntimeError("the server did not start")
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0, **options})

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            **{"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0, **options}
        )

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    @property
    def engine(self) -> Engine:
        """The engine, where it is in this process."""
        return self.serving.supervisor.transport._session.engine

    def hold(self) -> StepGate:
        """``with server.hold() as gate``: a step runs when the gate allows it. For tests that act during requests."""
        return StepGate(self.engine._core.runner)

    @property
    def idle(self) -> bool:
        """Nothing in flight, nothing in the engine, every block free."""
        stats = self.serving.client.stats
        busy = stats["num_running"] or stats["num_waiting"] or stats["kv_blocks_used"]
        return not busy and self.serving.client.in_flight == 0

    def stop(self) -> None:
        self.server.handle_exit(15, None)
        self.thread.join(60)
        self.http.close()
        if self.thread.is_alive():
            raise RuntimeError("the server did not stop")


@pytest.fixture(scope="session")
def start(tiny_model):
    """Context manager: ``with start(engine_options, **server_options) as server``."""

    @contextlib.contextmanager
    def begin(
        options: dict[str, Any] | None = None, opened: Any = None, **server: Any
    ) -> Iterator[RunningServer]:
        engine_options = {"model": tiny_model, "threads": 1, **(options or {})}
        running = RunningServer(engine_options, {"in_process": True, **server}, engine=opened)
        try:
            yield running
        finally:
            running.stop()

    return begin


@pytest.fixture(scope="session")
def server(start) -> Iterator[RunningServer]:
    """One server for all tests that leave it as they found it."""
    with start(served_model_names=("tiny", "second-name")) as running:
        yield running


@pytest.fixture(scope="session")
def until():
    """``until(condition, timeout)``."""
    return wait_until
