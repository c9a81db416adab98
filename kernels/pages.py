"""Memory straight from the operating system: reserved now, committed page by page as it is written, given back at once.

torch's own allocations may be filled when they are made (``torch.use_deterministic_algorithms`` does that), which would
commit a whole KV pool; these are nobody's business but ours.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def map_pages(nbytes: int) -> mmap.mmap:
    """Zeros, aligned to a page. Raises MemoryError."""
    try:
        return mmap.mmap(-1, max(nbytes, 1), **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"cannot reserve {nbytes >> 20} MiB ({error})") from error


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU on pages of its own, which go when the tensor does."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(map_pages(count * dtype.itemsize), dtype=dtype, count=count).view(shape)
