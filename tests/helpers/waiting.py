"""Waiting for what another thread does, and acting while it is at it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paged_backend.testing import StepGate


def wait_until(condition: Callable[[], Any], timeout: float = 20.0) -> None:
    """Return once the condition holds; fail after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


async def cancel_while_it_runs(engine: Any, gate: StepGate, call: Awaitable[Any]) -> None:
    """Cancel ``call`` once the engine works for nobody else but it. The gate is closed at the end."""
    gate.open()
    while engine.stats().kv_blocks_used:
        await asyncio.sleep(0.002)
    gate.close()
    task = asyncio.ensure_future(call)
    while not engine.stats().num_running:
        gate.allow()
        await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
