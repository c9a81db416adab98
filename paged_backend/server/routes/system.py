"""The routes beside generation: models, tokens, health, metrics, and what is refused."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST

from paged_backend import __version__
from paged_backend.server.routes.answers import json_answer
from paged_backend.server.routes.prompts import chat_ids, encode, template_options
from paged_backend.server.routes.serving import Serving, serving_of
from paged_backend.server.wire.anthropic import VERSION, model_card
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    body_of,
    read_body,
)

openai_router = APIRouter(tags=["OpenAI"])
token_router = APIRouter(tags=["Tokens"])
system_router = APIRouter(tags=["System"])


@openai_router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The names this server answers to."""
    serving = serving_of(request)
    if VERSION in request.headers:
        cards = [_card(serving, name) for name in serving.names]
        return JSONResponse(
            {"data": cards, "has_more": False, "first_id": serving.names[0], "last_id": serving.names[-1]}
        )
    models = [_model(serving, name).model_dump(exclude_unset=True) for name in serving.names]
    return JSONResponse({"object": "list", "data": models})


@openai_router.get("/v1/models/{model:path}", response_model=Model)
async def retrieve_model(model: str, request: Request) -> Response:
    """One of them."""
    serving = serving_of(request)
    serving.check_model(model)
    if VERSION in request.headers:
        return JSONResponse(_card(serving, model))
    return json_answer(_model(serving, model).model_dump_json(exclude_unset=True))


def _model(serving: Serving, name: str) -> Model:
    extra: dict[str, Any] = {
        "max_model_len": serving.client.max_model_len,
        "root": serving.engine_config.model,
    }
    return Model(id=name, object="model", created=serving.created, owned_by="paged_backend", **extra)


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return model_card(name, serving.created, serving.client.max_model_len)


@openai_router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """Refused: this server's model generates text and has no embeddings."""
    raise ApiError(
        400, "embeddings are not supported: this server's model generates text", code="unsupported_operation"
    )


@token_router.post("/tokenize", openapi_extra=body_of(TokenizeRequest), response_model=TokenizeResponse)
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of messages by the chat template."""
    serving = serving_of(request)
    body = await read_body(request, TokenizeRequest)
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages", param="prompt", code="invalid_value")
    if body.prompt is not None:
        split = bool(
            body.split_special_tokens
        )  # a prompt's special tokens act as such unless it says otherwise
        ids = await encode(serving, body.prompt, body.add_special_tokens is not False, split)
    else:
        ids = await chat_ids(
            serving, body.messages or [], tools=body.tools, **template_options(serving, body)
        )
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": serving.client.max_model_len, "tokens": ids}
    names = [serving.tokenizer.id_to_token(token) or "" for token in ids] if body.return_token_strs else None
    answer["token_strs"] = names
    return json_answer(TokenizeResponse(**answer).model_dump_json(exclude_unset=True))


@token_router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest), response_model=DetokenizeResponse)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    serving = serving_of(request)
    body = await read_body(request, DetokenizeRequest)
    serving.check_model(body.model)
    for token in body.tokens:
        if token >= serving.tokenizer.vocab_size:
            raise ApiError(
                400, f"tokens has id {token}, outside the vocabulary of {serving.tokenizer.vocab_size}", param="tokens",
                code="invalid_value",
            )  # fmt: skip
    text = serving.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return json_answer(DetokenizeResponse(prompt=text).model_dump_json())


@token_router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """What a client needs to render messages itself: special tokens and chat template."""
    tokenizer = serving_of(request).tokenizer
    answer: dict[str, Any] = {
        "tokenizer_class": type(tokenizer.backend.model).__name__,
        **tokenizer.named_tokens,
    }
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        answer.setdefault(name, None)
    if tokenizer.chat_template is not None:
        answer["chat_template"] = tokenizer.chat_template
    return JSONResponse(answer)


@system_router.get("/ping")
@system_router.post("/ping")
async def ping(request: Request) -> Response:
    """/health by the name that hosts of containers ask for. Needs no API key."""
    return await health(request)


@system_router.get("/load")
async def load(request: Request) -> Response:
    """Requests in flight, for balancers."""
    return JSONResponse({"server_load": serving_of(request).client.in_flight})


@system_router.get("/health")
async def health(request: Request) -> Response:
    """200 if a request sent now would be computed now, else 503. Needs no API key."""
    state = serving_of(request).health
    return JSONResponse({"status": state}, 200 if state in ("ok", "degraded") else 503)


@system_router.get("/ready")
async def ready(request: Request) -> Response:
    """200 if new requests are taken: healthy, and not about to shut down."""
    serving = serving_of(request)
    state = "draining" if serving.draining else serving.health
    return JSONResponse({"status": state}, 200 if state in ("ok", "degraded") else 503)


@system_router.get("/version")
async def version() -> Response:
    """The version of this package."""
    return JSONResponse({"version": __version__})


@system_router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    serving = serving_of(request)
    text = serving.metrics.render(serving.client, serving.supervisor.restarts)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@system_router.get("/stats")
async def stats(request: Request) -> Response:
    """The engine as it was within the last second, as JSON."""
    serving = serving_of(request)
    return JSONResponse(
        {
            "model": serving.name,
            "health": "draining" if serving.draining else serving.health,
            "restarts": serving.supervisor.restarts,
            "max_model_len": serving.client.max_model_len,
            "in_flight": serving.client.in_flight,
            "output_tokens": serving.client.num_output_tokens,
            "engine": serving.client.stats,
        }
    )
