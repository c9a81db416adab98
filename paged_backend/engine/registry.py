"""One process, one engine per model: everybody who names the same model shares weights, KV pool, prefixes and batch."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from dataclasses import fields
from typing import Any

from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.engine.factory import build_engine

WEIGHT_OPTIONS = ("model", "device", "dtype", "kernels", "quantization")
"""Options that need another copy of the weights; engines that differ in these are different engines."""


class EngineRegistry:
    """Open engines by model, with the number of their users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[tuple[Any, ...], tuple[Engine, int]] = {}
        self._left: deque[Engine] = deque()

    def get(self, config: EngineConfig, given: frozenset[str]) -> Engine:
        """The open engine for ``config``, or a new one. given: the options the caller named, which must be honoured.

        Raises ValueError if the model is open with another value of one of them.
        """
        key = tuple(_resolved(config, name) for name in WEIGHT_OPTIONS)
        with self._lock:
            self._count_left()
            engine, users = self._engines.get(key, (None, 0))
            if engine is None or engine.health in ("closed", "dead"):
                engine, users = build_engine(config, on_release=lambda: self._release(key)), 0
            for name in given - set(WEIGHT_OPTIONS):
                mine, theirs = getattr(config, name), getattr(engine.config, name)
                if mine != theirs:
                    raise ValueError(
                        f"{config.model!r} is already open in this process with {name}={theirs!r}, asked was {mine!r}: "
                        "use the same option, close the other engine first, or pass share=False for a second copy"
                    )
            self._engines[key] = (engine, users + 1)
            return engine

    def _release(self, key: tuple[Any, ...]) -> bool:
        """One user less; True if it was the last and the engine must really close."""
        with self._lock:
            self._count_left()
            engine, users = self._engines.get(key, (None, 1))
            if engine is not None and users > 1:
                self._engines[key] = (engine, users - 1)
                return False
            self._engines.pop(key, None)
            return True

    def leave(self, engine: Engine) -> None:
        """One user less, but the engine stays open for whoever comes next. Takes no lock: finalizers may call it."""
        self._left.append(engine)

    def _count_left(self) -> None:
        while self._left:
            gone = self._left.popleft()
            for key, (engine, users) in self._engines.items():
                if engine is gone:
                    self._engines[key] = (engine, max(users - 1, 0))

    def close_all(self) -> None:
        with self._lock:
            engines = [engine for engine, _ in self._engines.values()]
            self._engines.clear()
        for engine in engines:
            engine.shutdown()


def _resolved(config: EngineConfig, name: str) -> Any:
    value = getattr(config, name)
    return os.path.realpath(value) if name == "model" and os.path.exists(value) else value


_registry = EngineRegistry()
atexit.register(_registry.close_all)


def get_engine(model: str, *, share: bool = True, **options: Any) -> Engine:
    """The engine for ``model`` in this process; opened if need be. See :class:`EngineConfig` for the options.

    Callers that name the same model get the same engine, unless they ask for another way to hold its weights or
    pass ``share=False``. Each caller closes its own use (``close`` or ``with``), once; the last one really closes it.
    """
    config = EngineConfig.from_options(model, **options)
    if not share:
        return build_engine(config)
    defaults = {f.name: f.default for f in fields(EngineConfig)}
    given = frozenset(name for name in options if options[name] != defaults[name])
    return _registry.get(config, given)


def leave_engine(engine: Engine) -> None:
    """Give up a use of an engine from :func:`get_engine` without closing it, even if nobody else uses it now.

    For objects that are made and dropped often: the next one finds the weights still loaded.
    """
    _registry.leave(engine)
