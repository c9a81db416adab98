"""Waiting for what another thread does, and acting while it is at it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from paged_backend.engine.stream import RequestState
from paged_backend.testing import StepGate


def wait_until(condition: Callable[[], Any], timeout: float = 30.0) -> None:
    """Return once the condition holds; ``TimeoutError`` after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not come to be")
        time.sleep(0.002)


def hold_until_there_are(count: int, engine: Any) -> threading.Event:
    """Keep an engine over a ``ScriptedRunner`` from its first step until it has ``count`` requests; set when it has."""
    reached = threading.Event()

    def hold(works: Any) -> None:
        if not reached.is_set():
            wait_until(lambda: len(engine._lease.requests) >= count)
            reached.set()

    engine._core.runner.before_run = hold
    return reached


async def cancel_while_it_runs(engine: Any, gate: StepGate, call: Awaitable[Any]) -> None:
    """Cancel ``call`` once the engine works for nobody else but it. The gate is closed at the end."""
    while engine.stats().kv_blocks_used:
        gate.allow()
        await asyncio.sleep(0.002)
    gate.close()
    task = asyncio.ensure_future(call)
    while not engine.stats().num_running:
        gate.allow()
        await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@contextlib.contextmanager
def piece_by_piece() -> Iterator[None]:
    """Nothing new is shown to the reader of a stream before it has taken what there was.

    Else a reader that is slow finds several tokens in one piece, as it should. For streams only: nobody takes anything
    of a result that is waited for as a whole.
    """
    apply = RequestState.apply

    def in_step(state: RequestState, update: Any) -> bool:
        wait_until(lambda: all(c._sent_tokens == len(c.token_ids) for c in state.completions), 60)
        return apply(state, update)

    with mock.patch.object(RequestState, "apply", in_step):
        yield
