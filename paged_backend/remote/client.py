"""EngineClient: the server's hold on its engine, whichever process it runs in and however often that is restarted."""

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
from paged_backend.remote.job import Job, Ticket
from paged_backend.remote.protocol import Message
from paged_backend.sampling_params import SamplingParams

logger = logging.getLogger("paged_backend.server")
MAX_CRASHES = 3
"""Engine crashes that a request may be part of before it is held to be their cause."""


class QueueFullError(PagedBackendError):
    """Too many requests are in flight. retry_after: seconds after which a seat is likely to be free."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClient:
    """Tickets go out by ``send`` (set while an engine is there) and what comes back is given to :meth:`receive`.

    max_waiting: sequences that may be in flight beyond the seats of the engine. seed: as in ``EngineConfig``.
    """

    def __init__(self, max_waiting: int, seed: int | None = None) -> None:
        self.max_waiting = max_waiting
        self.hello: Message = {}
        self.stats: dict[str, Any] = {}
        self.send: Callable[[Message], None] | None = None
        self.on_finished: Callable[[Ticket, str], None] = lambda ticket, reason: None
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count()
        self._seeds = itertools.count(seed) if seed is not None else None
        self._sequences = 0
        self._suspects: deque[Ticket] = deque()
        self._on_trial: Ticket | None = None
        self._recent: deque[float] = deque(maxlen=64)
        self._dead: Exception | None = None

    # --- for the HTTP side ---------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        return int(self.hello["max_model_len"])

    @property
    def generation_config(self) -> dict[str, Any]:
        return dict(self.hello.get("generation_config") or {})

    @property
    def in_flight(self) -> int:
        """Tickets that have not ended."""
        return len(self._tickets)

    async def open(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, cache_salt: str | None = None
    ) -> Job:
        """Submit ``prompts`` and wait until the engine has taken them all in.

        Raises :class:`QueueFullError`, or what the engine says against one of them; then none runs.
        """
        if self._dead is not None:
            raise self._dead
        self._check_room(len(prompts) * params.n)
        tickets = []
        for prompt in prompts:
            seed = params.seed
            if seed is None:
                seed = next(self._seeds) if self._seeds is not None else secrets.randbits(62)
            ticket = Ticket(next(self._numbers), prompt, dataclasses.replace(params, seed=seed), cache_salt)
            tickets.append(ticket)
            self._tickets[ticket.number] = ticket
            self._sequences += params.n
        job = Job(tickets, self.abort)
        try:
            if self.send is not None:
                for ticket in tickets:
                    self.send(ticket.message())
            for ticket in tickets:
                await ticket.accepted
        except BaseException:
            job.__exit__()
            raise
        return job

    def abort(self, ticket: Ticket) -> None:
        """Stop it; its blocks are free within one step."""
        if self._tickets.get(ticket.number) is ticket:
            self._end(ticket, "abort")
            if self.send is not None:
                self.send({"t": "abort", "id": ticket.number})

    def _check_room(self, new: int) -> None:
        room = int(self.hello["max_num_seqs"]) + self.max_waiting
        if new > room:
            raise RequestRejectedError(
                f"the request asks for {new} sequences (prompts x n), this server takes at most {room} at once"
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
                ticket = self._tickets.get(item["id"])
                if ticket is not None:
                    self._take(ticket, item)
        elif kind == "pong":
            self.stats = message["stats"]
        else:
            ticket = self._tickets.get(message["id"])
            if ticket is None:
                return
            if kind == "accepted" and not ticket.accepted.done():
                self.num_prompt_tokens += len(ticket.prompt_token_ids)
                ticket.accepted.set_result(None)
            elif kind == "refused":
                ticket.fail(_error(message))
                self._end(ticket, "error")

    def _take(self, ticket: Ticket, item: Message) -> None:
        before = ticket.num_output_tokens
        ticket.take(item)
        self.num_output_tokens += ticket.num_output_tokens - before
        if "error" in item:
            ticket.fail(_error(item["error"]))
        if ticket is self._on_trial:
            self._try_next()
        if ticket.finished:
            self._end(ticket, "error" if ticket.error is not None else "done")

    def _end(self, ticket: Ticket, reason: str) -> None:
        del self._tickets[ticket.number]
        self._sequences -= ticket.params.n
        self._recent.append(time.monotonic())
        if ticket is self._on_trial:
            self._try_next()
        self.on_finished(ticket, reason)

    # --- from the supervisor -------------------------------------------------------------------------------------

    def engine_up(self, hello: Message, send: Callable[[Message], None]) -> None:
        """An engine is there: give it what is in flight.

        What has seen two crashes is suspected of them, and started one at a time: the next one when the last has made
        progress. So a request that kills the engine is found, and fails alone.
        """
        self.hello, self.stats, self.send = hello, hello["stats"], send
        self._suspects.clear()
        for ticket in list(self._tickets.values()):
            if ticket.crashes >= MAX_CRASHES - 1:
                self._suspects.append(ticket)
            else:
                send(ticket.message())
        self._try_next()

    def engine_down(self) -> None:
        """The engine is gone, with all it had not yet told."""
        self.send = None
        blamed = [self._on_trial] if self._on_trial is not None else list(self._tickets.values())
        self._on_trial = None
        self._suspects.clear()
        for ticket in blamed:
            ticket.crashes += 1
            if ticket.crashes >= MAX_CRASHES:
                logger.error(
                    "a request was running in each of %d engine crashes; it is given up", ticket.crashes
                )
                ticket.fail(RequestFailedError("the engine crashed each time it ran this request"))
                self._end(ticket, "error")
        for ticket in self._tickets.values():
            if ticket.params.beam_search is not None:
                ticket.forget()

    def give_up(self, error: Exception) -> None:
        """There will be no engine any more: everything gets ``error``, now and later."""
        self._dead, self.send = error, None
        for ticket in list(self._tickets.values()):
            ticket.fail(error)
            self._end(ticket, "error")

    def _try_next(self) -> None:
        self._on_trial = None
        while self._suspects and self.send is not None:
            ticket = self._suspects.popleft()
            if self._tickets.get(ticket.number) is ticket:
                self._on_trial = ticket
                self.send(ticket.message())
                return


def _error(wire: Message) -> Exception:
    kinds: dict[str, type[Exception]] = {
        "context": ContextOverflowError,
        "rejected": RequestRejectedError,
        "closed": EngineClosedError,
    }
    return kinds.get(wire["kind"], RequestFailedError)(wire["message"])
