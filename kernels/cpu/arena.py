"""Memory for packed weights, in huge pages where the system has them.

A step reads all weights once. With pages of 4 KiB that is a page walk for every 64 cache lines, and zero-filling such
memory is a fault for each; pages of 2 MiB make both 512 times rarer. Matrices share chunks, because a huge page of its
own for each would waste half a page per matrix.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

from paged_backend.kernels.pages import map_pages

_CHUNK = 32 << 20  # bytes
_HUGE_PAGE = 2 << 20
_LINE = 64


class Arena:
    """Zero-filled byte tensors, never given back one by one: a chunk is freed when the last tensor in it is. Safe from
    any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def zeros(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], aligned to a cache line. Raises MemoryError."""
        with self._lock:
            if nbytes > self._chunk.numel() - self._used:
                self._chunk, self._used = _map(max(nbytes, _CHUNK)), 0
            start = self._used
            self._used += -(-nbytes // _LINE) * _LINE
            return self._chunk[start : start + nbytes]


def _map(nbytes: int) -> Tensor:
    memory = map_pages(nbytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + nbytes]
