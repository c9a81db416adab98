"""Engine: a core with a thread that runs its steps, a thread that turns tokens into text, and a thread-safe door.

    caller --submit/abort--> inbox --> loop thread: core.step() --> outbox --> output thread --> RequestState --> caller

The loop never waits for a tokenizer, a detokenizer or a client: text is made while the next step computes (kernels
release the GIL). A stop string found in the text ends its sample one step later; tokens made meanwhile are dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from paged_backend.config import EngineConfig
from paged_backend.constrain.grammar import GrammarCompiler
from paged_backend.engine.core import EngineCore, Update
from paged_backend.engine.input_processor import InputProcessor
from paged_backend.engine.inputs import Prompt
from paged_backend.engine.request import Request
from paged_backend.engine.stats import EngineStats
from paged_backend.engine.stream import RequestHandle, RequestState
from paged_backend.errors import DeviceLostError, EngineClosedError, RequestFailedError, RequestRejectedError
from paged_backend.outputs import RequestOutput
from paged_backend.sampling_params import SamplingParams

logger = logging.getLogger("paged_backend")
T = TypeVar("T")


class Engine:
    """Serves one model to any number of threads and event loops. Get one from ``paged_backend.get_engine``.

    eos_token_ids: end of sequence. generation_config: the model's defaults for sampling options.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Any,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        generation_config: Mapping[str, Any] | None = None,
        block_bytes: int = 0,
        on_release: Callable[[], bool] = lambda: True,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.generation_config = dict(generation_config or {})
        self.grammars = GrammarCompiler(tokenizer, self.eos_token_ids)
        self._input_processor = InputProcessor(
            core.limits, tokenizer, self.grammars, self.eos_token_ids, self.generation_config, config.seed
        )
        self._core = core
        self._block_bytes = block_bytes
        self._on_release = on_release
        self._states: dict[str, RequestState] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._failure: BaseException | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._outbox: queue.SimpleQueue[list[Update] | None] = queue.SimpleQueue()
        self._loop_thread = threading.Thread(
            target=self._guard, args=(self._loop,), name="paged_backend-loop", daemon=True
        )
        self._output_thread = threading.Thread(
            target=self._guard, args=(self._deliver,), name="paged_backend-output", daemon=True
        )
        self._loop_thread.start()
        self._output_thread.start()

    # --- requests ------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens, by the model's context and the pool."""
        return self._core.limits.longest_request()

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in one step, and so most samples of one request."""
        return self._core.scheduler.max_num_seqs

    @property
    def vocab_size(self) -> int:
        """Token ids are below this number."""
        return self._core.runner.vocab_size

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        resume_output_ids: Mapping[int, Sequence[int]] | None = None,
        cache_salt: str | None = None,
    ) -> RequestHandle:
        """Queue one prompt (text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``).

        resume_output_ids: {sample: its output in an earlier run with the same seed}. The samples go on as that run
        would have, and give out only what is new; samples that are left out have ended. cache_salt: cached prefixes are
        shared only between requests with equal salts.

        Raises :class:`RequestRejectedError` (``ValueError``) for a request that could never run; the engine is not
        affected.
        """
        self._ensure_open()
        made = self._input_processor.prepare(
            prompt, params or SamplingParams(), request_id, resume_output_ids, cache_salt
        )
        return self._enqueue([made])[0]

    def submit_many(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str | None] | None = None,
    ) -> list[RequestHandle]:
        """Queue several at once, so that the first step sees all of them. Every one is checked before any is queued.

        What :class:`RequestRejectedError` says begins with the number of the prompt, which is its ``index`` too.
        """
        self._ensure_open()
        ids = request_ids or [None] * len(prompts)
        made = []
        for index, item in enumerate(zip(prompts, params, ids)):
            try:
                made.append(self._input_processor.prepare(*item))
            except RequestRejectedError as error:
                raise error.at(index, len(prompts)) from error.__cause__
        return self._enqueue(made)

    def _enqueue(self, made: Sequence[tuple[list[Request], RequestState]]) -> list[RequestHandle]:
        if len({state.request_id for _, state in made}) < len(made):
            raise RequestRejectedError("request ids must be unique")
        for _, state in made:
            if state.request_id in self._states:
                raise RequestRejectedError(f"request id {state.request_id!r} is already in use")

        def add() -> None:
            for requests, state in made:
                if not state.finished:  # else it was aborted before the loop saw it
                    self._prompt_tokens += len(state.prompt_token_ids)
                    for request in requests:
                        self._core.add(request)

        self._states.update((state.request_id, state) for _, state in made)
        self._post(add)
        return [RequestHandle(state, self.abort) for _, state in made]

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Submit and stream. Leaving the iteration, or cancelling the task, aborts the request."""
        handle = self.submit(prompt, params, request_id)
        stream = handle.__aiter__()
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    def abort(self, request_id: str) -> None:
        """Stop a request; unknown and finished ids are ignored. Safe from any thread."""
        state = self._states.get(request_id)
        if state is None:
            return
        state.end("abort")
        self._post(lambda: self._drop(request_id))

    def _drop(self, request_id: str) -> None:
        self._core.finish(request_id)
        self._states.pop(request_id, None)

    def _ensure_open(self) -> None:
        if self._closing or self.health == "dead":
            raise EngineClosedError("the engine is closed: open a new one with get_engine(...) or LLM(...)")

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the loop thread between two steps and return its result."""
        self._ensure_open()
        if threading.current_thread() is self._loop_thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._post(run)
        return future.result()

    # --- the two threads -----------------------------------------------------------------------------------------

    def _guard(self, body: Callable[[], None]) -> None:
        """Whatever ends a thread before its time, every waiter is woken with an error instead of waiting for ever."""
        try:
            body()
        except BaseException as error:
            logger.exception("a thread of the engine has died")
            self._failure = error
        finally:
            if not self._closing:
                died = EngineClosedError(
                    f"a thread of the engine has died ({self._failure!r}): open a new engine"
                )
                for state in list(self._states.values()):
                    state.end("error", died)

    def _loop(self) -> None:
        core = self._core
        while True:
            with self._wake:
                while not (self._inbox or core.has_work or self._closing):
                    self._wake.wait()
                actions = list(self._inbox)
                self._inbox.clear()
            for action in actions:
                try:
                    action()
                except Exception as error:
                    self._recover(error)
            if self._closing:
                break
            if not core.has_work:
                continue
            try:
                self._outbox.put(core.step())
                if not core.has_work:
                    core.check()  # a leak or a broken table becomes loud while nobody is harmed
            except DeviceLostError:
                raise  # nothing can be computed any more: the loop ends and everybody is told
            except Exception as error:
                self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Bookkeeping raised (a bug here, not a bad request): give up what is running, keep serving what comes."""
        logger.exception("the engine's bookkeeping failed; its requests get the error and it goes on")
        self._failure = error
        self._outbox.put(self._core.fail_all(error))

    def _deliver(self) -> None:
        while (updates := self._outbox.get()) is not None:
            for update in updates:
                self._deliver_one(update)

    def _deliver_one(self, update: Update) -> None:
        request_id, index = update.request.request_id, update.index
        state = self._states.get(request_id)
        if state is None:
            return
        if update.sampled is not None:
            self._generation_tokens += 1
        try:
            if state.apply(update):
                self._post(lambda: self._finish_sample(request_id, index))
        except Exception as error:
            failure = RequestFailedError(f"request {request_id} failed while its text was made: {error!r}")
            failure.__cause__ = error
            state.end("error", failure)
            self._post(lambda: self._drop(request_id))
        if state.finished:
            self._states.pop(request_id, None)

    def _finish_sample(self, request_id: str, index: int) -> None:
        self._core.finish(request_id, index)

    # --- looking at it, ending it --------------------------------------------------------------------------------

    @property
    def health(self) -> str:
        """``ok``; ``degraded`` after bookkeeping failed once (it serves on); ``closed``; ``dead`` if a thread ended."""
        if self._closing:
            return "closed"
        if not (self._loop_thread.is_alive() and self._output_thread.is_alive()):
            return "dead"
        return "degraded" if self._failure is not None else "ok"

    def stats(self) -> EngineStats:
        """A snapshot; counts may be from within a running step."""
        return EngineStats.of(
            self._core, self._prompt_tokens, self._generation_tokens, self._block_bytes, self.health
        )

    def trim(self) -> int:
        """Drop cached prefixes that nobody uses, give their memory back; returns the number of blocks."""
        return self.call(self._core.trim)

    def check(self) -> None:
        """Raise if a block leaked or a cache invariant is broken."""
        self.call(self._core.check)

    def close(self) -> None:
        """Give up this use of the engine; when nobody else in the process uses it, :meth:`shutdown` it."""
        if not self._closing and self._on_release():
            self.shutdown()

    def shutdown(self) -> None:
        """Abort what runs, end the threads, release the memory, whoever still uses it. Every waiter is woken."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._loop_thread:
            self._loop_thread.join()
        self._outbox.put(None)  # after the last updates of the loop
        if threading.current_thread() not in (self._loop_thread, self._output_thread):
            self._output_thread.join()
        error = EngineClosedError("the engine was closed while the request ran")
        for state in list(self._states.values()):
            state.end("error", error)
        self._states.clear()
        self._core.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
