"""Trimmer: when an engine gives memory back although nobody asked.

Idle for ``idle_timeout`` seconds, it gives back all that no request uses, once: KV memory, cached prefixes with it, and
what the heap keeps of the memory of past steps. While it works
it asks every second whether the system runs short, and gives back what is missing, the coldest prefixes first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from paged_backend.engine.core import EngineCore
from paged_backend.machine import trim_heap

logger = logging.getLogger("paged_backend")
_SECONDS_BETWEEN_LOOKS = 1.0
_WORTH_A_LOOK = 32 << 20  # bytes that are unused; less helps no system out of its need


class Trimmer:
    """For one engine, in its loop's thread. idle_timeout: seconds; 0 waits for ever.

    block_bytes: of one KV block. missing: bytes that the system is short of. clock: in seconds.
    """

    def __init__(
        self,
        core: EngineCore,
        block_bytes: int,
        idle_timeout: float,
        missing: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._block_bytes = block_bytes
        self._idle_timeout = idle_timeout
        self._missing = missing
        self._clock = clock
        self._can_give_back = core.runner.give_back(())
        self._next_look = 0.0
        self._deadline: float | None = None

    def after_step(self) -> None:
        """The engine has worked; it may be idle from now on."""
        if not self._can_give_back:
            return
        now = self._clock()
        if self._idle_timeout:
            self._deadline = now + self._idle_timeout
        if now >= self._next_look:
            self._next_look = now + _SECONDS_BETWEEN_LOOKS
            self._relieve()

    def patience(self) -> float | None:
        """Seconds that an idle engine may wait until :meth:`idle` is due; None: it never will be without a step."""
        return None if self._deadline is None else max(self._deadline - self._clock(), 0.0)

    def idle(self) -> None:
        """The engine has been idle for so long."""
        self._deadline = None
        count = self._core.trim()
        trim_heap()
        logger.info("idle: %d KV blocks (%d MiB) given back", count, count * self._block_bytes >> 20)

    def _relieve(self) -> None:
        pool = self._core.cache.pool
        if (pool.num_committed - pool.num_used) * self._block_bytes < _WORTH_A_LOOK:
            return
        missing = self._missing()
        if missing:
            count = self._core.trim(-(-missing // self._block_bytes))
            logger.info(
                "memory is short: %d KV blocks (%d MiB) given back", count, count * self._block_bytes >> 20
            )
