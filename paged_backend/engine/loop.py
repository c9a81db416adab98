"""EngineLoop: the two threads of an engine, the requests in it, and when all of it ends.

    submit/abort --> inbox --> loop thread: core.step() --> outbox --> output thread --> RequestState --> caller

The loop never waits for a tokenizer, a detokenizer or a client: text is made while the next step computes (kernels
release the GIL). A stop string found in the text ends its sample one step later; tokens made meanwhile are dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from paged_backend.engine.core import EngineCore, Update
from paged_backend.engine.request import Request
from paged_backend.engine.stream import RequestState
from paged_backend.engine.trimmer import Trimmer
from paged_backend.errors import (
    DeviceLostError,
    EngineClosedError,
    RequestFailedError,
    RequestRejectedError,
    call_user,
)

logger = logging.getLogger("paged_backend")
T = TypeVar("T")


class Lease:
    """One user's hold on an engine, with the requests of that user by their ids.

    It ends once: when it is closed, or when the collector finds that the user and the user's requests are gone.
    """

    def __init__(self, loop: EngineLoop) -> None:
        """Raises :class:`EngineClosedError` if the engine is about to end."""
        loop.enter()
        self.requests: dict[str, RequestState] = {}
        self._end = weakref.finalize(self, loop.leave)
        self._end.atexit = False
        self._loop = loop

    @property
    def open(self) -> bool:
        return self._end.alive

    def close(self) -> None:
        """Give up this use. If it was the last one, the engine ends before this returns."""
        if self._end.detach() is not None:
            self._loop.leave_now()

    def close_soon(self) -> None:
        """The same without waiting for the end. Takes no lock: finalizers may call it."""
        self._end()


class EngineLoop:
    """Runs ``core`` until its last user has left, it is shut down or one of its threads dies; then frees its memory.

    What finalizers call (:meth:`leave`, :meth:`drop`) takes no lock: the collector may run them in a thread that holds
    any. So an engine that nobody uses ends itself, in its own thread.
    """

    def __init__(self, core: EngineCore, trimmer: Trimmer) -> None:
        self.core = core
        self._trimmer = trimmer
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._failure: str | None = None
        self._died = False
        self._closing = False
        self._ended = False
        self._lock = threading.Lock()
        """Held for a few instructions, around ``_users``, ``_states``, ``_ended``, and what is posted under it."""
        self._users = 0
        self._left: deque[None] = deque()
        self._states: dict[RequestState, Lease] = {}
        """What runs, and whose it is: an engine stays open for its requests."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[list[Update] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._at_exit = functools.partial(_shut_down, weakref.ref(self))
        self._loop_thread = threading.Thread(target=self._run, name="paged_backend-loop", daemon=True)
        self._output_thread = threading.Thread(target=self._deliver, name="paged_backend-output", daemon=True)

    def start(self) -> None:
        """Start the threads. They keep this object alive until they end."""
        atexit.register(self._at_exit)
        self._output_thread.start()
        self._loop_thread.start()

    # --- users ---------------------------------------------------------------------------------------------------

    @property
    def health(self) -> str:
        """``ok``; ``degraded`` after bookkeeping failed once (it serves on); ``closed``; ``dead`` if a thread ended."""
        if self._closing:
            return "closed"
        if self._died or not (self._loop_thread.is_alive() and self._output_thread.is_alive()):
            return "dead"  # in the child of a fork as well
        return "degraded" if self._failure is not None else "ok"

    def count_users(self) -> int:
        """How many hold a :class:`Lease`."""
        with self._lock:
            self._count_left()
            return self._users

    def enter(self) -> None:
        """One user more. Raises :class:`EngineClosedError` if it is too late."""
        self.ensure_open()
        with self._lock:
            self._count_left()
            if self._closing:
                raise _closed()
            self._users += 1

    def leave(self) -> None:
        """One user less, some time soon. For finalizers."""
        self._left.append(None)
        self._inbox.put(_look)

    def leave_now(self) -> None:
        """One user less; the last one waits until the engine has ended."""
        self.leave()
        if self._is_own_process() and self.count_users() == 0:
            self.shutdown()

    def _count_left(self) -> None:
        """Under the lock. Who leaves last closes the door: nobody can enter between that and the end."""
        gone = False
        while self._left:
            self._left.pop()
            self._users -= 1
            gone = True
        if gone and self._users == 0:
            self._closing = True

    def ensure_open(self) -> None:
        """Raise :class:`EngineClosedError` unless requests can still be run."""
        if self.health in ("closed", "dead"):
            raise _closed()

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(self, made: Sequence[tuple[list[Request], RequestState]], lease: Lease) -> None:
        """Queue requests of the holder of ``lease``, all of them or, if an id is in use, none."""
        names = [state.request_id for _, state in made]
        if len(set(names)) < len(names):
            raise RequestRejectedError("request ids must be unique")

        def add() -> None:
            for requests, state in made:
                if not state.finished:  # else it was aborted before the loop saw it
                    self.prompt_tokens += len(state.prompt_token_ids)
                    for request in requests:
                        self.core.add(request)

        with self._lock:
            for name in names:
                known = lease.requests.get(name)
                if known is not None and not known.finished:
                    raise RequestRejectedError(f"request id {name!r} is already in use")
            self._check_taking()
            for _, state in made:  # before the loop hears of them: their first tokens may come at once
                lease.requests[state.request_id] = state
                self._states[state] = lease
            self._inbox.put(add)

    def abort(self, state: RequestState) -> None:
        """Stop a request; no effect on one that has ended."""
        state.end("abort")
        self._inbox.put(lambda: self._take_out(state))

    def drop(self, state: RequestState) -> None:
        """Abort a request that nobody waits for. For finalizers."""
        self._inbox.put(lambda: self._take_out(state))

    def _take_out(self, state: RequestState) -> None:
        state.end("abort")
        self._forget(state)
        self.core.finish(state)

    def _forget(self, state: RequestState) -> None:
        with self._lock:
            lease = self._states.pop(state, None)
            if lease is not None and lease.requests.get(state.request_id) is state:
                del lease.requests[state.request_id]
        # the lease may end with this reference to it, here where no lock is held

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the loop thread between two steps and return its result."""
        self.ensure_open()
        if threading.current_thread() is self._loop_thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # the caller's affair, and raised there
                future.set_exception(error)

        with self._lock:
            self._check_taking()
            self._inbox.put(run)
        return future.result()

    def _check_taking(self) -> None:
        """Raise if it is too late. What goes into the inbox under the same lock is run, at last by :meth:`_end`."""
        if self._ended or self._closing:
            raise _closed()

    # --- the loop thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._died_of(error)
        finally:
            self._end()

    def _loop(self) -> None:
        core = self.core
        while True:
            self._act(wait=not core.has_work)
            if self._left:
                self.count_users()
            if self._closing or self._died:
                return
            if not core.has_work:
                continue
            try:
                self._outbox.put(core.step())
                self._trimmer.after_step()
                if not core.has_work:
                    core.check()  # a leak or a broken table becomes loud while nobody is harmed
            except DeviceLostError:
                raise  # nothing can be computed any more: the loop ends and everybody is told
            except Exception as error:
                self._recover(error)

    def _act(self, wait: bool) -> None:
        """Do what was asked for; wait for something to do if there is nothing else."""
        while wait or not self._inbox.empty():
            try:
                action = self._inbox.get(timeout=self._trimmer.patience() if wait else None)
            except queue.Empty:
                action = self._trimmer.idle
            wait = False
            try:
                action()
            except Exception as error:
                self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Bookkeeping raised (a bug here, not a bad request): give up what is running, keep serving what comes."""
        logger.exception("the engine's bookkeeping failed; its requests get the error and it goes on")
        self._failure = repr(error)
        self._outbox.put(self.core.fail_all(error))

    def _died_of(self, error: BaseException) -> None:
        logger.error("a thread of the engine has died", exc_info=error)
        self._failure, self._died = repr(error), True

    def _end(self) -> None:
        """Let everything go. Whatever ended the loop, every waiter is woken instead of waiting for ever."""
        with self._lock:
            self._ended = True
        self._outbox.put(None)  # after the last updates of the loop
        self._output_thread.join()
        error = EngineClosedError(
            f"a thread of the engine has died ({self._failure}): open a new engine"
            if self._died
            else "the engine was closed while the request ran"
        )
        for state in list(self._states):
            state.end("error", error)
            self._forget(state)
        while not self._inbox.empty():  # callers wait for what they have posted
            with contextlib.suppress(Exception):
                self._inbox.get()()
        try:
            self.core.release()
        except Exception:  # of a device that is gone
            logger.debug("an engine's memory was not given back in order", exc_info=True)
        atexit.unregister(self._at_exit)

    # --- the output thread ---------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        try:
            while self._deliver_some(self._outbox.get()):
                pass
        except BaseException as error:
            self._died_of(error)
            self._inbox.put(_look)

    def _deliver_some(self, updates: list[Update] | None) -> bool:
        for update in updates or ():
            self._deliver_one(update)
        return updates is not None

    def _deliver_one(self, update: Update) -> None:
        state = update.request.owner
        if state not in self._states or not isinstance(state, RequestState):
            return
        if update.sampled is not None:
            self.generation_tokens += 1
        try:
            if call_user(state.apply, update):
                self._inbox.put(functools.partial(self._finish_sample, state, update.index))
        except Exception as error:
            failure = RequestFailedError(
                f"request {state.request_id} failed while its text was made: {error!r}"
            )
            failure.__cause__ = error
            state.end("error", failure)
            self.drop(state)
        if state.finished:
            self._forget(state)

    def _finish_sample(self, state: RequestState, index: int) -> None:
        self.core.finish(state, index)

    # --- the end -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Abort what runs, end the threads, release the memory, whoever still uses it. Every waiter is woken."""
        self._closing = True
        self._inbox.put(_look)
        if self._is_own_process() and threading.current_thread() not in (
            self._loop_thread,
            self._output_thread,
        ):
            self._loop_thread.join()

    def _is_own_process(self) -> bool:
        """False in the child of a fork, which has none of the threads, and maybe a lock that one of them held."""
        return os.getpid() == self._process


def _look() -> None:
    """An action that does nothing: the loop looks around after each."""


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine is closed: open a new one with get_engine(...) or LLM(...)")


def _shut_down(loop: weakref.ref[EngineLoop]) -> None:
    """At exit, before the interpreter takes away what the threads run on."""
    running = loop()
    if running is not None:
        running.shutdown()
