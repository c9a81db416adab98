"""Memory straight from the operating system: reserved at once, committed page by page as it is written."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

from paged_backend.kernels.array import Array

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def map_pages(nbytes: int) -> mmap.mmap:
    """Zeros, aligned to a page. Raises MemoryError."""
    try:
        return mmap.mmap(-1, max(nbytes, 1), **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"cannot reserve {nbytes >> 20} MiB ({error})") from error


def reserve(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array on pages of its own, which go when the array does."""
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(map_pages(count * dtype.itemsize), dtype, count).reshape(shape)
