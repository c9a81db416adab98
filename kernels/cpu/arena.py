"""Memory for packed weights, in huge pages where the system has them.

A step reads all weights once. With pages of 4 KiB that is a page walk for every 64 cache lines, and zero-filling such
memory is a fault for each; pages of 2 MiB make both 512 times rarer. Matrices share chunks, because a huge page of its
own for each would waste half a page per matrix.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np

from paged_backend.kernels.array import Array
from paged_backend.kernels.pages import map_pages

_CHUNK = 32 << 20  # bytes
_HUGE_PAGE = 2 << 20
_LINE = 64


class Arena:
    """Zero-filled byte arrays, never given back one by one: a chunk is freed when the last array in it is. Safe from
    any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def zeros(self, nbytes: int) -> Array:
        """uint8 [nbytes], aligned to a cache line. Raises MemoryError."""
        with self._lock:
            if nbytes > self._chunk.size - self._used:
                self._chunk, self._used = _map(max(nbytes, _CHUNK)), 0
            start = self._used
            self._used += -(-nbytes // _LINE) * _LINE
            return self._chunk[start : start + nbytes]


def _map(nbytes: int) -> Array:
    memory = map_pages(nbytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + nbytes]
