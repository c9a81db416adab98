"""The errors the engine raises. Each message says what was wrong and how to put it right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from paged_backend.outputs import RequestOutput

T = TypeVar("T")


class PagedBackendError(Exception):
    """Base of every error raised on purpose by this package."""


class ModelLoadError(PagedBackendError):
    """A model folder, file or tensor is missing, damaged or does not fit its config."""


class UnsupportedModelError(ModelLoadError):
    """The architecture or one of its settings has no implementation here."""


class BackendUnavailableError(PagedBackendError, RuntimeError):
    """The kernels or the device that were asked for are not to be had on this machine."""


class MissingExtraError(PagedBackendError, ImportError):
    """Packages that only a part of this one needs are not installed. The message has the command that installs them."""


class RequestRejectedError(PagedBackendError, ValueError):
    """A request was refused at the door; the engine never saw it and goes on serving.

    index: its place in the batch it came in, None for one by itself.
    """

    index: int | None = None

    def at(self, index: int, count: int) -> RequestRejectedError:
        """The same error of prompt ``index`` of ``count``, named in the message."""
        told = type(self)(f"prompt {index} of {count}: {self}" if count > 1 else str(self))
        told.index = index
        return told


class ContextOverflowError(RequestRejectedError):
    """The prompt is longer than the model's context or than the whole KV pool."""


class RequestFailedError(PagedBackendError):
    """A request failed while it ran; the others were not affected. ``__cause__`` has the reason."""


class CallbackError(PagedBackendError):
    """A function of the user has raised what is no ``Exception``, ``SystemExit`` say. ``__cause__`` has it."""


class RequestAbortedError(PagedBackendError):
    """The result of an aborted request was asked for."""


class EngineClosedError(PagedBackendError):
    """The engine was closed; open a new one with ``get_engine`` or ``LLM``."""


class DeviceLostError(PagedBackendError):
    """The GPU has failed in a way that ends this process' use of it. Its engine is dead; a new process may go on."""


class BatchError(RequestFailedError):
    """Some requests of a batch failed. ``outputs`` holds every result, the good ones included."""

    def __init__(self, message: str, outputs: Sequence[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


@contextmanager
def missing_extra(extra: str, what: str) -> Iterator[None]:
    """Around the imports of an extra's packages: where one is missing, :class:`MissingExtraError` says so.

    what: needs them, as the subject of a sentence ("the server").
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("paged_backend."):
            raise  # ours, which no installation brings
        raise MissingExtraError(
            f"{what} needs {error.name}: pip install 'paged-backend[{extra}]'", name=error.name
        ) from error


def call_user(function: Callable[..., T], *args: Any) -> T:
    """Call a function that a user gave in a thread that is not the user's.

    What it raises comes out as an ``Exception``, so that it ends what it was called for and not the thread:
    :class:`CallbackError` for anything else. Only Ctrl-C, which comes to the main thread alone, goes through.
    """
    try:
        return function(*args)
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise CallbackError(f"a callback raised {type(error).__name__}: {error}") from error
