"""The FastAPI application, put together from its parts."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from paged_backend import __version__
from paged_backend.config import EngineConfig
from paged_backend.remote.client import EngineClient
from paged_backend.remote.supervisor import Supervisor
from paged_backend.remote.transports import LocalTransport, ProcessTransport, Transport
from paged_backend.server.config import ServerConfig
from paged_backend.server.metrics import Metrics
from paged_backend.server.routes import chat, completions, messages, pages, responses, system
from paged_backend.server.routes.serving import Serving
from paged_backend.server.run.middleware import RequestMiddleware
from paged_backend.server.store import ResponseStore
from paged_backend.server.wire import anthropic, schema
from paged_backend.server.wire.errors import ApiError

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine

_BODIES = (
    schema.ChatRequest,
    schema.CompletionRequest,
    schema.ResponsesRequest,
    anthropic.MessagesRequest,
    anthropic.CountTokensRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
)


def create_app(
    engine_config: EngineConfig,
    config: ServerConfig | None = None,
    *,
    engine: Engine | None = None,
    transport: Transport | None = None,
    drop: Callable[[Any], None] = lambda client: None,
    on_failed: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An ASGI application that serves one model; its engine lives as long as the application's lifespan.

    engine: one that is open already, to be served from this process and closed with the application. transport: where
    the engine runs otherwise; by default as ``config`` says. drop: closes the connection of a client, given its
    address. on_failed: called when the engine is gone for good. :func:`open_serving` may be called before the lifespan
    begins; the supervisor is then closed by the caller.
    """
    config = config or ServerConfig()
    if engine is not None:
        transport = LocalTransport(lambda: engine)
    elif transport is None:
        transport = (
            LocalTransport(lambda: _local_engine(engine_config))
            if config.in_process
            else ProcessTransport(engine_config, log_format=config.log_format)
        )
    client = EngineClient(config.max_waiting, engine_config.seed)
    metrics = Metrics((config.served_model_names or (engine_config.model,))[0])
    client.on_finished = metrics.finished
    supervisor = Supervisor(
        transport,
        client,
        stall_timeout=config.stall_timeout,
        max_restarts=config.max_restarts,
        on_failed=on_failed,
    )
    responses_kept = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
    serving = Serving(config, engine_config, client, supervisor, metrics, responses_kept)
    serving.tokenizer = engine.tokenizer if engine is not None else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if supervisor.state != "starting":
            yield  # whoever has opened it closes it
            return
        await open_serving(serving)
        try:
            yield
        finally:
            await supervisor.close()

    app = FastAPI(
        title="paged_backend",
        version=__version__,
        description="OpenAI-compatible API over a paged-attention engine.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.serving = serving
    for router in (
        chat.router,
        completions.router,
        responses.router,
        messages.router,
        system.openai_router,
        system.token_router,
        system.system_router,
        pages.router,
    ):
        app.include_router(router)
    app.add_exception_handler(HTTPException, _http_error)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestMiddleware, serving=serving, drop=drop)
    _document(app)
    return app


async def open_serving(serving: Serving) -> None:
    """Load the tokenizer and start the engine. Raises what kept the model from being served."""
    config = serving.engine_config
    given, source = serving.tokenizer, config.tokenizer or config.model
    loading = asyncio.create_task(asyncio.to_thread(_load_tokenizer, source if given is None else given))
    try:
        await serving.supervisor.start()
        serving.tokenizer = await loading
        wanted = serving.config.chat_template
        if wanted is not None:
            serving.tokenizer = copy.copy(serving.tokenizer)  # an engine's own goes on as it was
            serving.tokenizer.templates = {"default": serving.tokenizer.templates.get(wanted, wanted)}
    except BaseException:
        loading.cancel()
        raise


def _load_tokenizer(source: Any) -> Any:
    """The tokenizer at ``source``, or ``source`` if it is one, ready to be used without delay."""
    from paged_backend.errors import RequestRejectedError
    from paged_backend.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source) if isinstance(source, str) else source
    with contextlib.suppress(
        RequestRejectedError
    ):  # a model without a chat template, or with an exacting one
        tokenizer.encode_chat(
            [{"role": "user", "content": "warm up"}]
        )  # loads Jinja, which would stall a stream later
    return tokenizer


def _local_engine(config: EngineConfig) -> Any:
    from paged_backend.engine.factory import build_engine

    return build_engine(config)


def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown routes and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path, headers = request.url.path[:200], dict(getattr(error, "headers", None) or {})
    if status == 404:
        raise ApiError(404, f"there is no route {path!r}", code="unknown_url")
    if status == 405:
        raise ApiError(
            405, f"{path!r} does not take {request.method}", code="method_not_allowed", headers=headers
        )
    raise ApiError(status, str(getattr(error, "detail", error)), code="http_error", headers=headers)


def _document(app: FastAPI) -> None:
    """Bodies are read by the routes themselves; their schemas are added to the OpenAPI document here."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _, made = models_json_schema(
                [(model, "validation") for model in _BODIES], ref_template="#/components/schemas/{model}"
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(made["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
