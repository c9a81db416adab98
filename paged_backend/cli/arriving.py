"""Arriving: what a slow input has brought so far."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Arriving(Generic[T]):
    """Items read ahead in a thread, so that a slow pipe holds up neither the engine nor the results."""

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._queue: queue.Queue[T | None] = queue.Queue(ahead)
        self.ended = False
        self.failure: Exception | None = None
        threading.Thread(target=self._read, args=(items,), name="paged_backend-input", daemon=True).start()

    def _read(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._queue.put(item)
        except OSError as error:
            self.failure = error
        finally:
            self._queue.put(None)

    def take(self, most: int, patience: float | None) -> list[T]:
        """What has arrived, at most ``most`` items; waits up to ``patience`` seconds (None: for ever) for the first."""
        if self.ended or most <= 0:
            if patience is not None:
                threading.Event().wait(patience)
            return []
        taken: list[T] = []
        while len(taken) < most:
            try:
                item = self._queue.get(block=not taken, timeout=patience)
            except queue.Empty:
                break
            if item is None:
                self.ended = True
                break
            taken.append(item)
        return taken
