"""Together: the requests of one synchronous batch reach the engine in one piece, though each is made in its own thread.

LangChain runs a batch as calls in threads, with callbacks, caches and errors of each call apart. That stays so; only
the moment of handing over is shared, so that the engine's first step sees the whole batch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from paged_backend.engine.engine import Engine
from paged_backend.engine.stream import RequestHandle
from paged_backend.sampling_params import SamplingParams

_MOST_THREADS = 256  # callers of one batch that wait at the same time


class Together:
    """Waits until each of ``count`` callers has brought a request or has left without one."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._items: list[_Item] = []
        self._changed = threading.Condition()

    def submit(self, engine: Engine, prompt: Any, params: SamplingParams) -> RequestHandle:
        """Hand over with the others; raises what the engine says of this request alone."""
        item = _Item(engine, prompt, params)
        with self._changed:
            self._items.append(item)
            self._arrived()
            self._changed.wait_for(lambda: item.done)
        if item.error is not None:
            raise item.error
        return item.handle

    def leave(self) -> None:
        with self._changed:
            self._arrived()

    def _arrived(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            for engine in {id(item.engine): item.engine for item in self._items}.values():
                _hand_over(engine, [item for item in self._items if item.engine is engine])
            self._changed.notify_all()


class _Item:
    def __init__(self, engine: Engine, prompt: Any, params: SamplingParams) -> None:
        self.engine, self.prompt, self.params = engine, prompt, params
        self.handle: Any = None
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.handle is not None or self.error is not None


def _hand_over(engine: Engine, items: Sequence[_Item]) -> None:
    try:
        handles = engine.submit_many([item.prompt for item in items], [item.params for item in items])
    except Exception:
        # one is refused, which refuses all: each by itself then, so that each hears only of its own
        for item in items:
            try:
                item.handle = engine.submit(item.prompt, item.params)
            except Exception as error:
                item.error = error
    else:
        for item, handle in zip(items, handles):
            item.handle = handle


_batch: ContextVar[Together | None] = ContextVar("paged_backend_batch", default=None)
_seat: ContextVar[list[Together] | None] = ContextVar("paged_backend_seat", default=None)


@contextmanager
def together(count: int) -> Iterator[None]:
    """The threads started inside, which inherit the context, make up one batch of ``count`` calls."""
    token = _batch.set(Together(count) if 1 < count <= _MOST_THREADS else None)
    try:
        yield
    finally:
        _batch.reset(token)


@contextmanager
def seat() -> Iterator[None]:
    """One call of a batch; outside of a batch it does nothing."""
    batch = _batch.get()
    if batch is None:
        yield
        return
    taken = [batch]
    tokens = _batch.set(None), _seat.set(taken)  # calls that this call makes are not of the batch
    try:
        yield
    finally:
        _batch.reset(tokens[0])
        _seat.reset(tokens[1])
        if taken:
            taken.pop().leave()


def as_completed(
    base: Callable[..., Iterator[Any]], inputs: Sequence[Any], config: Any, options: Any
) -> Iterator[Any]:
    """``base``, a batch_as_completed, for calls that make up one batch."""
    results = base(inputs, wide(config, len(inputs)), **options)
    try:
        # all calls are started by the first step; what happens between the others is the consumer's own
        with together(len(inputs) if unlimited(config) else 1):
            first = list(itertools.islice(results, 1))
        yield from first
        yield from results
    finally:
        results.close()  # type: ignore[attr-defined]


def submit(engine: Engine, prompt: Any, params: SamplingParams) -> RequestHandle:
    """``engine.submit``, together with the batch that this call belongs to, if it does."""
    taken = _seat.get()
    return taken.pop().submit(engine, prompt, params) if taken else engine.submit(prompt, params)


def threads(count: int) -> int:
    return min(max(count, 1), _MOST_THREADS)


def wide(config: Any, count: int) -> Any:
    """The config of a batch with as many threads as it has inputs, unless it names a limit of its own."""
    if isinstance(config, Sequence):
        return [wide(item, count) for item in config]
    config = dict(config or {})
    if config.get("max_concurrency") is None:
        config["max_concurrency"] = threads(count)
    return config


def unlimited(config: Any) -> bool:
    """Whether all calls of a batch with this config run at once. (LangChain asks the first one of a list.)"""
    first = config[0] if isinstance(config, Sequence) and config else config
    return not first or first.get("max_concurrency") is None
