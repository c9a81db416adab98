"""EngineClient: a hold on an engine, wherever that runs and however often it is restarted."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paged_backend.errors import (
    ContextOverflowError,
    EngineClosedError,
    PagedBackendError,
    RequestFailedError,
    RequestRejectedError,
)
from paged_backend.remote.job import Job, RemoteRequest
from paged_backend.remote.protocol import Message
from paged_backend.sampling_params import SamplingParams

logger = logging.getLogger("paged_backend.remote")
MAX_CRASHES = 3
"""Engine crashes that a request may be part of before it is held to be their cause."""


class QueueFullError(PagedBackendError):
    """Too many requests are in flight. retry_after: seconds after which a seat is likely to be free."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClient:
    """Requests go out by ``send`` (set while an engine is there) and what comes back is given to :meth:`receive`.

    max_waiting: sequences that may be in flight beyond the seats of the engine. seed: as in ``EngineConfig``.
    """

    def __init__(self, max_waiting: int, seed: int | None = None) -> None:
        self.max_waiting = max_waiting
        self.hello: Message = {}
        self.stats: dict[str, Any] = {}
        self.send: Callable[[Message], None] | None = None
        self.on_finished: Callable[[RemoteRequest, str], None] = lambda remote, reason: None
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._requests: dict[int, RemoteRequest] = {}
        self._numbers = itertools.count()
        self._seeds = itertools.count(seed) if seed is not None else None
        self._sequences = 0
        self._suspects: deque[RemoteRequest] = deque()
        self._on_trial: RemoteRequest | None = None
        self._recent: deque[float] = deque(maxlen=64)
        self._dead: Exception | None = None

    # --- for those who ask ---------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        return int(self.hello["max_model_len"])

    @property
    def generation_config(self) -> dict[str, Any]:
        return dict(self.hello.get("generation_config") or {})

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    async def open(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, cache_salt: str | None = None
    ) -> Job:
        """Submit ``prompts`` and wait until the engine has taken them all in.

        Raises :class:`QueueFullError`, or what the engine says against one of them; then none runs.
        """
        if self._dead is not None:
            raise self._dead
        self._check_room(len(prompts) * params.n)
        requests = []
        for prompt in prompts:
            seed = params.seed
            if seed is None:
                seed = next(self._seeds) if self._seeds is not None else secrets.randbits(62)
            remote = RemoteRequest(
                next(self._numbers), prompt, dataclasses.replace(params, seed=seed), cache_salt
            )
            requests.append(remote)
            self._requests[remote.number] = remote
            self._sequences += params.n
        job = Job(requests, self.abort)
        try:
            if self.send is not None:
                for remote in requests:
                    self.send(remote.message())
            for remote in requests:
                await remote.accepted
        except BaseException:
            job.__exit__()
            raise
        return job

    def abort(self, remote: RemoteRequest) -> None:
        """Stop it; its blocks are free within one step."""
        if self._requests.get(remote.number) is remote:
            self._end(remote, "abort")
            if self.send is not None:
                self.send({"t": "abort", "id": remote.number})

    def _check_room(self, new: int) -> None:
        room = int(self.hello["max_num_seqs"]) + self.max_waiting
        if new > room:
            raise RequestRejectedError(
                f"the request asks for {new} sequences (prompts x n), the engine takes at most {room} at once"
            )
        if self._sequences + new > room:
            raise QueueFullError(
                f"the queue is full: {self._sequences} sequences are in flight, and at most {room} may be",
                self._retry_after(new),
            )

    def _retry_after(self, new: int) -> int:
        """Seconds until ``new`` sequences have ended, at the pace of the last ones; within [1, 60]."""
        if len(self._recent) < 2:
            return 1
        pace = (time.monotonic() - self._recent[0]) / len(self._recent)
        return min(max(math.ceil(new * pace), 1), 60)

    # --- from the engine -----------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """One message of the engine."""
        kind = message["t"]
        if kind == "news":
            for item in message["items"]:
                remote = self._requests.get(item["id"])
                if remote is not None:
                    self._take(remote, item)
        elif kind == "pong":
            self.stats = message["stats"]
        else:
            remote = self._requests.get(message["id"])
            if remote is None:
                return
            if kind == "accepted" and not remote.accepted.done():
                self.num_prompt_tokens += len(remote.prompt_token_ids)
                remote.accepted.set_result(None)
            elif kind == "refused":
                remote.fail(_error(message))
                self._end(remote, "error")

    def _take(self, remote: RemoteRequest, item: Message) -> None:
        before = remote.num_output_tokens
        remote.take(item)
        self.num_output_tokens += remote.num_output_tokens - before
        if "error" in item:
            remote.fail(_error(item["error"]))
        if remote is self._on_trial:
            self._try_next()
        if remote.finished:
            self._end(remote, "error" if remote.error is not None else "done")

    def _end(self, remote: RemoteRequest, reason: str) -> None:
        del self._requests[remote.number]
        self._sequences -= remote.params.n
        self._recent.append(time.monotonic())
        if remote is self._on_trial:
            self._try_next()
        self.on_finished(remote, reason)

    # --- from the supervisor -------------------------------------------------------------------------------------

    def engine_up(self, hello: Message, send: Callable[[Message], None]) -> None:
        """An engine is there: give it what is in flight.

        What has seen two crashes is suspected of them, and started one at a time: the next one when the last has made
        progress. So a request that kills the engine is found, and fails alone.
        """
        self.hello, self.stats, self.send = hello, hello["stats"], send
        self._suspects.clear()
        for remote in list(self._requests.values()):
            if remote.crashes >= MAX_CRASHES - 1:
                self._suspects.append(remote)
            else:
                send(remote.message())
        self._try_next()

    def engine_down(self) -> None:
        """The engine is gone, with all it had not yet told."""
        self.send = None
        blamed = [self._on_trial] if self._on_trial is not None else list(self._requests.values())
        self._on_trial = None
        self._suspects.clear()
        for remote in blamed:
            remote.crashes += 1
            if remote.crashes >= MAX_CRASHES:
                logger.error(
                    "a request was running in each of %d engine crashes; it is given up", remote.crashes
                )
                remote.fail(RequestFailedError("the engine crashed each time it ran this request"))
                self._end(remote, "error")
        for remote in self._requests.values():
            if remote.params.beam_search is not None:
                remote.forget()

    def give_up(self, error: Exception) -> None:
        """There will be no engine any more: everything gets ``error``, now and later."""
        self._dead, self.send = error, None
        for remote in list(self._requests.values()):
            remote.fail(error)
            self._end(remote, "error")

    def _try_next(self) -> None:
        self._on_trial = None
        while self._suspects and self.send is not None:
            remote = self._suspects.popleft()
            if self._requests.get(remote.number) is remote:
                self._on_trial = remote
                self.send(remote.message())
                return


def _error(wire: Message) -> Exception:
    kinds: dict[str, type[Exception]] = {
        "context": ContextOverflowError,
        "rejected": RequestRejectedError,
        "closed": EngineClosedError,
    }
    return kinds.get(wire["kind"], RequestFailedError)(wire["message"])
