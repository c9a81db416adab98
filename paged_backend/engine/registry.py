"""One process, one engine per model: everybody who names the same model shares weights, KV pool, prefixes and batch."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any

from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine, OpenModel
from paged_backend.engine.factory import build_engine
from paged_backend.engine.identity import WEIGHT_OPTIONS, weights_key
from paged_backend.errors import EngineClosedError
from paged_backend.vllm_options import own_options


class EngineRegistry:
    """Models that are open, by what their weights are. It keeps none of them open, but those in ``_idle``.

    The lock is held for a few instructions; a model is loaded outside of it, and only who asks for the same one waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[Hashable, Future[weakref.ref[OpenModel] | None]] = {}
        self._formats: dict[Hashable, str] = {}
        self._idle: deque[Engine] = deque()
        """Uses that nobody has any more, of models that are to stay open for whoever comes next."""

    def get(self, config: EngineConfig, given: frozenset[str]) -> Engine:
        """A use of the open model for ``config``, or of a new one. given: options that the caller named.

        Raises ValueError if the model is open and an option that was named is not what it was opened with.
        """
        key = weights_key(config, self._formats)
        while True:
            with self._lock:
                opening = self._models.get(key)
                mine = opening is None
                if opening is None:
                    opening = self._models[key] = Future()
            if mine:
                return self._open(key, opening, config)
            engine = self._join(opening, config, given)
            if engine is not None:
                return engine
            self._forget(key, opening)

    def _open(
        self, key: Hashable, opening: Future[weakref.ref[OpenModel] | None], config: EngineConfig
    ) -> Engine:
        try:
            engine = build_engine(config)
        except BaseException:
            self._forget(key, opening)
            opening.set_result(None)  # whoever waits tries for himself
            raise
        opening.set_result(weakref.ref(engine.model))
        return engine

    def _join(
        self,
        opening: Future[weakref.ref[OpenModel] | None],
        config: EngineConfig,
        given: frozenset[str],
    ) -> Engine | None:
        """A use of the model, once it is open; None if it could not be opened, has ended, or must make room."""
        found = opening.result()
        model = None if found is None else found()
        if model is None:
            return None
        try:
            engine = Engine.of(model)
        except EngineClosedError:
            return None
        idle = self._take_idle(model)
        for name in sorted(given.difference(WEIGHT_OPTIONS)):
            if not _is(model, name, config):
                others = model.loop.count_users() - 1 - len(idle)
                for each in [engine, *idle] if not others else [engine]:
                    each.close()
                if not others:
                    return None
                self._idle.extend(idle)
                raise ValueError(
                    f"{config.model!r} is already open in this process with {name}={_value(model, name)!r}, asked was "
                    f"{getattr(config, name)!r}: use the same option, close the other engine first, or pass "
                    "share=False for a second copy"
                )
        for each in idle:  # somebody has it now, with whom it ends
            each.close()
        return engine

    def _forget(self, key: Hashable, opening: Future[Any]) -> None:
        with self._lock:
            if self._models.get(key) is opening:
                del self._models[key]

    def _take_idle(self, model: OpenModel) -> list[Engine]:
        taken = []
        for _ in range(len(self._idle)):
            try:
                engine = self._idle.popleft()
            except IndexError:  # another thread looks too
                break
            if engine.model is model:
                taken.append(engine)
            elif engine.health not in ("closed", "dead"):
                self._idle.append(engine)
        return taken

    def leave(self, engine: Engine) -> None:
        """Keep the use of a model open that its user gives up. Takes no lock: finalizers may call it."""
        self._idle.append(engine)

    def begin_anew(self) -> None:
        """In the child of a fork: it has none of the threads that run the models, or that were loading some."""
        self.__init__()  # type: ignore[misc]


def _is(model: OpenModel, name: str, asked: EngineConfig) -> bool:
    """Whether an option of an open model is what a named option asks for."""
    if name == "kv_cache_dtype":
        return asked.stored_kv_dtype == model.config.stored_kv_dtype
    value = getattr(asked, name)
    if name == "tokenizer" and value is not None:
        value = os.path.realpath(value) if os.path.exists(value) else value
    return value == getattr(model.config, name) or value == _value(model, name)


def _value(model: OpenModel, name: str) -> Any:
    return model.effective.get(name, getattr(model.config, name))


_registry = EngineRegistry()
os.register_at_fork(after_in_child=_registry.begin_anew)


def get_engine(model: str, *, share: bool = True, **options: Any) -> Engine:
    """The engine for ``model`` in this process; opened if need be. See :class:`EngineConfig` for the options.

    Callers that name the same model share it, by whatever name, unless they ask for another way to hold its weights or
    pass ``share=False``. Every option that is named is honoured: if the model is open with another value, ValueError is
    raised. Each caller has a use of its own, given up by ``close``, by ``with``, or by dropping it; with the last one
    the model is closed.

    Options of vLLM's ``LLM`` are taken by its names, too, where they ask for what is done anyway (``vllm_options``).
    """
    options = own_options(options)
    config = EngineConfig.from_options(model, **options)
    return _registry.get(config, frozenset(options)) if share else build_engine(config)


def leave_engine(engine: Engine) -> None:
    """Give up a use of an engine from :func:`get_engine` without closing it, even if nobody else uses it now.

    For objects that are made and dropped often: the next one finds the weights still loaded, and one with other options
    has them closed. Takes no lock.
    """
    _registry.leave(engine)
