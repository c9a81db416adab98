"""RequestHandle: the caller's end of a request. Results gather here; nothing ever waits for the reader.

A reader that is slow gets everything since its last look in one piece, so what is unread is bounded by the
request's own length. A handle that is dropped, or an iteration that is left early, aborts the request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence

from paged_backend.engine.core import Update
from paged_backend.engine.output_processor import CompletionState, logprob_dict
from paged_backend.errors import RequestAbortedError, call_user
from paged_backend.outputs import Logprob, RequestMetrics, RequestOutput
from paged_backend.sampling_params import RequestOutputKind, SamplingParams
from paged_backend.tokenization import Decoder

logger = logging.getLogger("paged_backend")


class RequestState:
    """Everything known of a request so far. Written by the engine's output thread, read by the handle."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        completions: list[CompletionState],
        tokenizer: Decoder | None,
        metrics: RequestMetrics,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.completions = completions
        self.metrics = metrics
        self.error: Exception | None = None
        self.num_cached_tokens = 0
        self.changed = threading.Condition()
        self.version = 0
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            [None] if params.prompt_logprobs is not None else None
        )
        self._listeners: list[Callable[[], None]] = []

    @property
    def finished(self) -> bool:
        return all(c.finished for c in self.completions)

    def apply(self, update: Update) -> bool:
        """Take over what a step did; True if a stop string has just ended this sample."""
        with self.changed:
            completion = self.completions[update.index]
            self.num_cached_tokens = update.request.num_cached_tokens or 0
            if update.index == 0:
                self.metrics = update.request.metrics
            if self._prompt_logprobs is not None:
                for scored in update.prompt_logprobs:
                    self._prompt_logprobs.append(logprob_dict(scored, self._tokenizer))
            stopped = False
            if completion.finished:
                return False
            if update.error is not None:
                self.error = update.error
                completion.finish("error")
            elif update.sampled is not None:
                completion.beam = update.beam
                stopped = completion.append(update.sampled, update.finish_reason, update.stop_reason)
            elif update.finish_reason is not None:
                completion.finish(update.finish_reason)
            self._notify()
            return stopped

    def end(self, reason: str, error: Exception | None = None) -> None:
        """Finish whatever has not finished yet."""
        with self.changed:
            for completion in self.completions:
                if not completion.finished:
                    completion.finish(reason)
                    self.error = self.error or error
            self._notify()

    def _notify(self) -> None:
        self.version += 1
        self.changed.notify_all()
        for listener in list(self._listeners):
            try:
                call_user(listener)
            except Exception:  # an event loop that was closed meanwhile, say: nobody else may suffer from it
                logger.debug("a listener of request %s failed", self.request_id, exc_info=True)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` (from any thread) at every change; returns the function that stops that."""
        with self.changed:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def output(self, delta: bool = False) -> RequestOutput:
        """What there is now. The lock is held so that text, ids and logprobs belong together."""
        with self.changed:
            return RequestOutput(
                self.request_id,
                self.prompt,
                self.prompt_token_ids,
                [c.delta() if delta else c.snapshot() for c in self.completions],
                self.finished,
                list(self._prompt_logprobs) if self._prompt_logprobs is not None else None,
                self.num_cached_tokens,
                self.metrics,
                self.error,
            )


class RequestHandle:
    """Iterate it (``for`` or ``async for``) to stream, or take :meth:`result`. One reader at a time."""

    def __init__(
        self,
        state: RequestState,
        abort: Callable[[RequestState], None],
        drop: Callable[[RequestState], None],
    ) -> None:
        """drop: aborts the request without taking a lock, for the collector may find a handle in any thread."""
        self._state = state
        self._abort = abort
        self._drop = drop

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def finished(self) -> bool:
        return self._state.finished

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, over all n samples."""
        return sum(len(c.token_ids) for c in self._state.completions)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return all of it.

        Raises the request's error if it failed, :class:`RequestAbortedError` if it was aborted, ``TimeoutError`` after
        ``timeout`` seconds (the request goes on).
        """
        output = self.wait(timeout)
        if output.error is not None:
            raise output.error
        if any(c.finish_reason == "abort" for c in output.outputs):
            raise RequestAbortedError(f"request {self.request_id} was aborted")
        return output

    def wait(self, timeout: float | None = None) -> RequestOutput:
        """Like :meth:`result`, but errors and aborts come back inside the output."""
        state = self._state
        with state.changed:
            if not state.changed.wait_for(lambda: state.finished, timeout):
                raise TimeoutError(f"request {self.request_id} has not finished within {timeout} s")
        return state.output()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` from the engine's threads whenever there is news; returns the function that ends that."""
        return self._state.listen(listener)

    def news(self) -> RequestOutput:
        """What is new since the last call, at once; errors come back inside the output."""
        return self._state.output(delta=True)

    def abort(self) -> None:
        """Stop the request; its blocks are free within one step. Harmless if it has finished."""
        if not self._state.finished:
            self._abort(self._state)

    def __iter__(self) -> Generator[RequestOutput, None, None]:
        state, seen = self._state, 0
        try:
            while True:
                with state.changed:
                    while state.version == seen and not state.finished:
                        state.changed.wait()
                    # one look: a token between these and the output would make an empty piece of its own
                    seen, done = state.version, state.finished
                    outputs = self._outputs(done)
                yield from outputs
                if done:
                    return
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        import asyncio  # here, as the start of a program that has no event loop should not wait for it

        state, seen = self._state, 0
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.set)

        stop_listening = state.listen(wake)
        try:
            while True:
                while state.version == seen and not state.finished:
                    await news.wait()
                    news.clear()
                with state.changed:
                    seen, done = state.version, state.finished
                    outputs = self._outputs(done)
                for output in outputs:
                    yield output
                if done:
                    return
        finally:
            stop_listening()
            self.abort()

    def _outputs(self, done: bool) -> Sequence[RequestOutput]:
        kind = self._state.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not done:
            return ()
        output = self._state.output(delta=kind is RequestOutputKind.DELTA)
        if done and output.error is not None:
            raise output.error
        return (output,)

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None and not state.finished:
            self._drop(state)
