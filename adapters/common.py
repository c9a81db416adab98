"""EngineUses: the engines that one adapter object has open, and the sampling options that frameworks pass around."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.engine.facts import ModelFacts
from paged_backend.engine.registry import get_engine, leave_engine
from paged_backend.engine.stream import RequestHandle
from paged_backend.outputs import CompletionOutput, Logprob, RequestOutput
from paged_backend.sampling_params import SamplingParams

T = TypeVar("T")

SAMPLING_FIELDS = frozenset(f.name for f in dataclasses.fields(SamplingParams)) - {
    "output_kind",
    "detokenize",
}
ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "stop_sequences": "stop"}


class EngineUses:
    """Opens engines on first use and keeps them. Copies of the holder share it, deep and pickled ones begin anew.

    When it is dropped its engines stay open for whoever names the same model next; :meth:`close` really gives them up.
    given: an open engine to use, whatever model is named.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, given: Engine | None = None) -> None:
        self._options = dict(options or {})
        self._given = given
        self._lock = threading.Lock()
        self._engines: dict[str, Engine] = {}
        self._opening: dict[str, Future[Engine]] = {}
        self._facts: dict[str, ModelFacts] = {}
        if self._options.get("share", True):
            weakref.finalize(self, _leave, self._engines)

    def get(self, model: str) -> Engine:
        """The engine for ``model``, loaded here and now if it is not open."""
        engine = self.opened(model)
        if engine is None:
            with self._lock:
                engine = self.opened(model)
                if engine is None:
                    engine = self._engines[model] = get_engine(model, **self._options)
        return engine

    async def get_async(self, model: str) -> Engine:
        """The same for an event loop, which goes on while a thread of its own loads the model.

        (asyncio's pool of threads is small: a hundred calls that wait for the first load would fill it.)
        """
        engine = self.opened(model)
        if engine is not None:
            return engine
        mine: Future[Engine] = Future()
        mine.set_running_or_notify_cancel()  # who gives up waiting takes nothing from the others
        opening = self._opening.setdefault(model, mine)
        if opening is mine:
            threading.Thread(target=self._open, args=(model, mine), name="paged_backend-load").start()
        return await asyncio.shield(asyncio.wrap_future(opening))

    async def run(self, model: str, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` in a thread, once ``model`` is open: templates, encoding and grammars take their time."""
        await self.get_async(model)
        return await asyncio.to_thread(function, *args)

    def facts(self, model: str) -> ModelFacts:
        """What is known of ``model`` without opening it."""
        engine = self.opened(model)
        if engine is not None:
            return ModelFacts.of(engine)
        if model not in self._facts:
            options = {name: value for name, value in self._options.items() if name != "share"}
            self._facts[model] = ModelFacts.expected(EngineConfig.from_options(model, **options))
        return self._facts[model]

    def _open(self, model: str, opening: Future[Engine]) -> None:
        try:
            engine = self.get(model)
        except BaseException as error:
            del self._opening[model]
            opening.set_exception(error)
        else:
            del self._opening[model]
            opening.set_result(engine)

    def opened(self, model: str) -> Engine | None:
        """The engine if this object has it open already."""
        if self._given is not None:
            return self._given
        engine = self._engines.get(model)
        return None if engine is None or engine.health in ("closed", "dead") else engine

    def close(self) -> None:
        """Give up every engine; the last user's close frees its memory."""
        with self._lock:
            engines = list(self._engines.values())
            self._engines.clear()
        for engine in engines:
            engine.close()

    def __deepcopy__(self, memo: Any) -> EngineUses:
        return EngineUses(self._options, self._given)

    def __reduce__(self) -> Any:
        return EngineUses, (self._options,)


def _leave(engines: dict[str, Engine]) -> None:
    for engine in list(engines.values()):
        leave_engine(engine)


def sampling_params(*layers: Mapping[str, Any], **fixed: Any) -> SamplingParams:
    """SamplingParams from options in layers, later ones winning; None says nothing. Raises TypeError for other names.

    An explicit zero or empty list is a value like any other: ``stop=[]`` takes an earlier layer's stop away.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            name = ALIASES.get(name, name)
            if name not in SAMPLING_FIELDS:
                raise TypeError(
                    f"unknown option {name!r}; sampling options are {', '.join(sorted(SAMPLING_FIELDS))}"
                )
            if value is not None:
                merged[name] = value
    return SamplingParams(**{**merged, **fixed})


async def last_output(handle: RequestHandle) -> RequestOutput:
    """Await a request's end. Cancelling the task aborts the request."""
    async with aclosing(handle.__aiter__()) as outputs:
        found = [output async for output in outputs]
    return found[-1]


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Token counts in OpenAI's words; cached_tokens are those of the prompts that came from the prefix cache."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
    }


def openai_logprobs(completion: CompletionOutput, top: int | None) -> list[dict[str, Any]] | None:
    """Logprobs in the form of OpenAI's ``choices[].logprobs.content``; None if none were asked for. top: how many."""
    if completion.logprobs is None:
        return None
    content = []
    for token, entry in zip(completion.token_ids, completion.logprobs):
        ranked = sorted(entry.values(), key=lambda item: item.rank or 0)[: top or 0]
        content.append({**_logprob(entry[token]), "top_logprobs": [_logprob(item) for item in ranked]})
    return content


def _logprob(item: Logprob) -> dict[str, Any]:
    return {"token": item.token, "logprob": item.logprob, "bytes": list(item.utf8)}
