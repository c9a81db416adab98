"""RemoteRequest: one prompt on its way through an engine, seen from this end. It outlives the engine that runs it.

It knows every token that has arrived here, which is all that another engine needs to go on from there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from paged_backend.outputs import CompletionOutput, Logprob
from paged_backend.remote.protocol import Message, output_from_wire, params_to_wire, prompt_logprobs_from_wire
from paged_backend.sampling_params import SamplingParams


class RemoteRequest:
    """params: with a seed, so that a second run repeats the first. Used in the event loop of its client only."""

    def __init__(
        self,
        number: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None = None,
    ) -> None:
        self.number = number
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.cache_salt = cache_salt
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrival = time.monotonic()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.gaps: list[float] = []
        self.queued: float | None = None
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.error: Exception | None = None
        self.crashes = 0
        self.listener: Callable[[], None] = lambda: None
        self._histories: list[list[int]] = [[] for _ in range(params.n)]
        self._running = set(range(params.n))
        self._unread: list[CompletionOutput] = []
        self._wire = params_to_wire(params)

    @property
    def finished(self) -> bool:
        return self.error is not None or not self._running

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self._histories))

    def message(self) -> Message:
        """What makes an engine run the rest of it."""
        message: Message = {
            "t": "submit",
            "id": self.number,
            "prompt": self.prompt_token_ids,
            "params": self._wire,
        }
        if self.cache_salt is not None:
            message["salt"] = self.cache_salt
        if any(self._histories):
            params = {name: value for name, value in self._wire.items() if name != "prompt_logprobs"}
            resume = {index: self._histories[index] for index in sorted(self._running)}
            message.update(params=params, resume=resume)
        return message

    def take(self, item: Message) -> None:
        """What the engine is told of this request."""
        if self.finished:
            return
        if "cached" in item and not any(self._histories):
            self.num_cached_tokens = item["cached"]
            self.queued = item.get("queued")
            if "prompt_logprobs" in item:
                self.prompt_logprobs = prompt_logprobs_from_wire(item["prompt_logprobs"])
        now = time.monotonic()
        for wire in item["outputs"]:
            output = output_from_wire(wire)
            if output.index not in self._running:
                continue
            if output.token_ids:
                self._note_time(now, len(output.token_ids))
            self._histories[output.index].extend(output.token_ids)
            if output.finished:
                self._running.discard(output.index)
            self._unread.append(output)
        self.listener()

    def _note_time(self, now: float, count: int) -> None:
        if self.first_token is None:
            self.first_token = now
        elif self.params.n == 1 and self.last_token is not None:
            self.gaps.extend([(now - self.last_token) / count] * count)
        self.last_token = now

    def forget(self) -> None:
        """Start over: a beam search tells its outputs all at once, and a crash may have come between two of them."""
        self._histories = [[] for _ in self._histories]
        self._running = set(range(self.params.n))
        self._unread.clear()

    def fail(self, error: Exception) -> None:
        """End it with ``error``, unless it has ended."""
        if self.finished:
            return
        self.error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # whoever awaits it sees it; nobody has to
        self.listener()

    def read(self) -> list[CompletionOutput]:
        """What has come since the last call: one output per sample at most, however much it is."""
        if self.params.beam_search is not None and self._running and self.error is None:
            return []
        unread, self._unread = self._unread, []
        if len(unread) < 2:
            return unread
        merged: dict[int, CompletionOutput] = {}
        for output in unread:
            first = merged.get(output.index)
            merged[output.index] = output if first is None else _joined(first, output)
        return list(merged.values())


def _joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs = None if first.logprobs is None else [*first.logprobs, *(second.logprobs or ())]
    return CompletionOutput(
        first.index,
        first.text + second.text,
        [*first.token_ids, *second.token_ids],
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
    )


class Job:
    """Requests that belong together and are read together. abort: called for each that is unfinished at the end."""

    def __init__(self, requests: Sequence[RemoteRequest], abort: Callable[[RemoteRequest], None]) -> None:
        self.requests = list(requests)
        self._abort = abort
        self._news = asyncio.Event()
        for remote in self.requests:
            remote.listener = self._news.set

    @property
    def finished(self) -> bool:
        return all(remote.finished for remote in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(remote.prompt_token_ids) for remote in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(remote.num_output_tokens for remote in self.requests)

    @property
    def cached_tokens(self) -> int:
        return sum(remote.num_cached_tokens for remote in self.requests)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        for remote in self.requests:
            if not remote.finished:
                self._abort(remote)

    async def news(self, patience: float | None = None) -> AsyncIterator[list[tuple[int, CompletionOutput]]]:
        """(number of the request, what is new of one of its samples) until all have ended. Raises their errors.

        patience: seconds without news after which an empty list is given; None waits.
        """
        loop = asyncio.get_running_loop()
        while True:
            done = self.finished
            batch = [(i, output) for i, remote in enumerate(self.requests) for output in remote.read()]
            if batch or patience is not None:
                yield batch
            for remote in self.requests:
                if remote.error is not None:
                    raise remote.error
            if done:
                return
            timer = None if patience is None else loop.call_later(patience, self._news.set)
            await self._news.wait()
            self._news.clear()
            if timer is not None:
                timer.cancel()
