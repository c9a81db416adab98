"""EngineSession: an engine at the other end of a line of messages, in this process or in one of its own.

To the engine:   submit {id, prompt, params, resume?, salt?} | abort {id} | ping
From the engine: accepted {id} | refused {id, kind, message} | news {items} | pong {stats}
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from paged_backend.errors import ContextOverflowError, EngineClosedError
from paged_backend.remote.protocol import (
    Message,
    output_to_wire,
    params_from_wire,
    prompt_logprobs_to_wire,
)

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine
    from paged_backend.engine.stream import RequestHandle


@dataclass(slots=True)
class _Open:
    handle: RequestHandle
    told: set[int] = field(default_factory=set)
    """Samples whose end was sent."""
    first: bool = True


class EngineSession:
    """send: takes a message; called from a thread of this class, and from whoever calls :meth:`handle`.

    What several requests get from one step travels in one message.
    """

    def __init__(self, engine: Engine, send: Callable[[Message], None]) -> None:
        self.engine = engine
        self._send = send
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._at_door: dict[int, bool] = {}
        """Requests whose grammar is being compiled, and whether they were aborted meanwhile."""
        self._submissions = ThreadPoolExecutor(1, "paged_backend-grammars")
        self._changed: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_news, name="paged_backend-sender", daemon=True)
        self._sender.start()

    def hello(self) -> Message:
        """What the other end needs to know of the engine."""
        engine = self.engine
        return {
            "t": "ready",
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.config.max_num_seqs,
            "generation_config": engine.generation_config,
            "stats": asdict(engine.stats()),
        }

    def handle(self, message: Message) -> None:
        """Act on one message. Nothing that a request asks for raises here."""
        kind = message["t"]
        if kind == "submit":
            if message["params"].get("structured_outputs") is None:
                self._submit(message)
            else:  # compiling a grammar can take seconds, and nobody else has to wait for it
                self._at_door[message["id"]] = False
                self._submissions.submit(self._submit, message)
        elif kind == "abort":
            with self._lock:
                if message["id"] in self._at_door:
                    self._at_door[message["id"]] = True
                    return
            opened = self._open.pop(message["id"], None)
            if opened is not None:
                opened.handle.abort()
        elif kind == "ping":
            self._send({"t": "pong", "stats": asdict(self.engine.stats())})
        else:
            raise ValueError(f"unknown message {kind!r}")

    def close(self) -> None:
        """End the threads; the engine is its owner's."""
        self._submissions.shutdown(cancel_futures=True)
        self._changed.put(None)
        self._sender.join()

    def _submit(self, message: Message) -> None:
        number = message["id"]
        resume = message.get("resume")
        try:
            handle = self.engine.submit(
                {"prompt_token_ids": message["prompt"]},
                params_from_wire(message["params"]),
                str(number),
                resume_output_ids=None if resume is None else {int(i): ids for i, ids in resume.items()},
                cache_salt=message.get("salt"),
            )
        except Exception as error:
            with self._lock:
                self._at_door.pop(number, None)
            self._send({"t": "refused", "id": number, "kind": _kind(error), "message": str(error)})
            return
        with self._lock:
            if self._at_door.pop(number, False):
                handle.abort()
                return
            self._open[number] = _Open(handle)
        self._send({"t": "accepted", "id": number})
        handle.listen(lambda: self._changed.put(number))
        self._changed.put(number)  # for what came before the listener was there

    # --- the sender thread ---------------------------------------------------------------------------------------

    def _send_news(self) -> None:
        while True:
            numbers = [self._changed.get()]
            while not self._changed.empty():
                numbers.append(self._changed.get())
            if None in numbers:
                return
            items = [item for number in dict.fromkeys(numbers) if (item := self._news(number)) is not None]
            if items:
                self._send({"t": "news", "items": items})

    def _news(self, number: int | None) -> Message | None:
        opened = self._open.get(number) if number is not None else None
        if opened is None:
            return None
        output = opened.handle.news()
        fresh = []
        for sample in output.outputs:
            if sample.index in opened.told or not (sample.token_ids or sample.text or sample.finished):
                continue
            if sample.finished:
                opened.told.add(sample.index)
            fresh.append(output_to_wire(sample))
        if not fresh and not output.finished:
            return None
        item: Message = {"id": number, "outputs": fresh}
        if opened.first:
            opened.first = False
            item["cached"] = output.num_cached_tokens
            metrics = output.metrics
            if metrics is not None and metrics.first_scheduled_time is not None:
                item["queued"] = metrics.first_scheduled_time - metrics.arrival_time
            if output.prompt_logprobs is not None:
                item["prompt_logprobs"] = prompt_logprobs_to_wire(output.prompt_logprobs)
        if output.error is not None:
            item["error"] = {"kind": _kind(output.error), "message": str(output.error)}
        if output.finished:
            self._open.pop(number, None)  # type: ignore[arg-type]
        return item


def _kind(error: Exception) -> str:
    if isinstance(error, ContextOverflowError):
        return "context"
    if isinstance(error, EngineClosedError):
        return "closed"
    return "rejected" if isinstance(error, (ValueError, TypeError)) else "failed"
