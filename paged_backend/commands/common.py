"""Opening an engine for a command, and ending a command in an orderly way."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from paged_backend.engine.async_engine import Engine


def complain(message: str) -> None:
    """One line on stderr."""
    typer.echo(f"paged-backend: {message}", err=True)


@contextmanager
def open_engine(model: str, options: Mapping[str, Any]) -> Iterator[Engine]:
    """The engine for a command; a model that cannot be opened ends the program with a message and status 1."""
    from paged_backend.engine.registry import get_engine
    from paged_backend.errors import PagedBackendError

    try:
        engine = get_engine(model, **options)
    except (PagedBackendError, ValueError, OSError, ImportError) as error:
        complain(f"cannot open {model!r}: {error}")
        raise typer.Exit(1) from error
    with engine:
        yield engine


@contextmanager
def orderly_end() -> Iterator[None]:
    """Ctrl-C ends with the shell's usual status and no traceback; so does a reader of stdout that went away."""
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        # what is still buffered cannot be written either: keep the interpreter from trying at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
