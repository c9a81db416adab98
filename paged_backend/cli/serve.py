"""``paged-backend serve``: the OpenAI-compatible server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged_backend.cli.common import complain, orderly_end
from paged_backend.cli.flags import checked_config, with_flags
from paged_backend.cli.help import HeadedCommand, single_command

if TYPE_CHECKING:
    from paged_backend.server.config import ServerConfig

app = single_command()

STEP_TOKENS = 192
"""Enough for the kernels to be at their best; with more, the gaps between tokens grow whenever a prompt comes in."""


@app.command("serve", cls=HeadedCommand)
@with_flags("engine")
def serve(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or 'demo'.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that clients ask for; may be repeated. Default: MODEL.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; may be repeated.", show_envvar=False)
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with such keys, one a line. See also PAGED_BACKEND_API_KEY.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call the API; may be repeated.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="No process of its own for the engine, and no restarts.")
    ] = False,
    max_waiting: Annotated[int, typer.Option(help="Sequences that may wait for a seat; then 429.")] = 512,
    max_body_bytes: Annotated[int, typer.Option(help="Longest request body.")] = 8 << 20,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds until a request is given up. Default: never.")
    ] = None,
    slow_reader_timeout: Annotated[
        float, typer.Option(help="Seconds a client may leave a stream unread.")
    ] = 60.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get at shutdown.")
    ] = 30.0,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds without a step until the engine is restarted.")
    ] = 120.0,
    max_restarts: Annotated[int, typer.Option(help="Failed starts in a row until it gives up.")] = 5,
    max_stored_responses: Annotated[
        int, typer.Option(help="Responses kept for previous_response_id; 0 keeps none.")
    ] = 1000,
    max_stored_bytes: Annotated[int, typer.Option(help="Bytes of all that are kept.")] = 64 << 20,
    chat_template: Annotated[
        str | None, typer.Option(help="File with a Jinja template, or the name of one of the model's.")
    ] = None,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Run chat templates that requests bring.")
    ] = False,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts and tracebacks to the log.")
    ] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Serve a model to OpenAI clients, with a page for people at /.

    On the CPU, steps have at most 192 tokens unless --max-num-batched-tokens says otherwise, so that a long prompt does
    not hold up the streams of others.

    The first SIGINT or SIGTERM lets running requests finish, the second stops at once.
    """
    if engine.get("device", "cpu") == "cpu":
        engine = {"max_num_batched_tokens": STEP_TOKENS, **engine}
    checked_config(model, engine)
    from paged_backend.server.config import ServerConfig
    from paged_backend.server.run.auth import collect_keys

    try:
        config = ServerConfig(
            host=host,
            port=port,
            served_model_names=tuple(served_model_name or ()),
            api_keys=collect_keys(api_key or (), api_key_file),
            cors_origins=tuple(cors_origin or ()),
            in_process=in_process,
            max_waiting=max_waiting,
            max_body_bytes=max_body_bytes,
            request_timeout=request_timeout,
            slow_reader_timeout=slow_reader_timeout,
            drain_timeout=drain_timeout,
            stall_timeout=stall_timeout,
            max_restarts=max_restarts,
            max_stored_responses=max_stored_responses,
            max_stored_bytes=max_stored_bytes,
            chat_template=_template(chat_template),
            trust_request_chat_template=trust_request_chat_template,
            log_format=log_format,
            log_prompts=log_prompts,
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    with orderly_end():
        status = _run(model, engine, config)
    if status:
        raise typer.Exit(status)


def _run(model: str, engine: dict[str, Any], config: ServerConfig) -> int:
    from paged_backend.config import EngineConfig
    from paged_backend.errors import PagedBackendError, missing_extra
    from paged_backend.server.run.listening import ListenError, listen

    with ExitStack() as listening:
        try:
            # first of all: whether the port is to be had is known before seconds go into imports and the model
            sockets = [listening.enter_context(made) for made in listen(config.host, config.port)]
        except ListenError as error:
            complain(str(error))
            raise typer.Exit(1) from error
        try:
            with missing_extra("server", "the server"):
                from paged_backend.server.run.serve import serve as run_server
            return run_server(EngineConfig(model=model, **engine), config, sockets)
        except (PagedBackendError, ValueError, OSError, ImportError) as error:
            complain(f"cannot serve {model!r}: {error}")
            raise typer.Exit(1) from error


def _template(given: str | None) -> str | None:
    """The text of a template file, or the name of one of the model's templates."""
    if given is not None and Path(given).is_file():
        return Path(given).read_text("utf-8")
    return given
