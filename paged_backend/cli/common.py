"""Opening an engine for a command, and ending a command in an orderly way."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from paged_backend.notices import told

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine


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


_READER_WENT_AWAY = 128 + 13  # SIGPIPE, which Windows has no name for
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def orderly_end() -> Iterator[None]:
    """Around a whole command. What the library warns of is one line on stderr each, in the form of other complaints.

    Ctrl-C ends with the shell's usual status and no traceback; so does a reader of stdout that went away, and output
    that cannot be written.
    """
    try:
        with told(complain):
            yield
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        _give_up_stdout()
        raise typer.Exit(_READER_WENT_AWAY) from None
    except OSError as error:
        if os.name == "nt" and error.errno == errno.EINVAL:  # how Windows says that the reader went away
            _give_up_stdout()
            raise typer.Exit(_READER_WENT_AWAY) from None
        if error.errno not in _NO_ROOM:
            raise
        _give_up_stdout()
        complain(f"cannot write the output: {error.strerror}")
        raise typer.Exit(1) from error


def orderly(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: a command that runs inside :func:`orderly_end`."""

    @functools.wraps(command)
    def call(*arguments: Any, **options: Any) -> None:
        with orderly_end():
            command(*arguments, **options)

    return call


def _give_up_stdout() -> None:
    """What is still buffered cannot be written either: keep the interpreter from trying at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
