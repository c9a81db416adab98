"""A file as memory: pages are read when they are looked at, and shared with whoever else maps them."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from pathlib import Path


def map_file(path: Path) -> mmap.mmap:
    """The whole file as a private mapping, writable (writes never reach the disk) where the system allows that.

    Raises OSError, or ValueError for an empty file.
    """
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError:
            # a system that counts private mappings refuses one larger than its memory
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def drop_pages(mapped: Iterable[mmap.mmap]) -> None:
    """Give back the memory of mappings that nobody has written to; what is looked at again is read again.

    Pages that were read once to be packed would count as memory of this process for as long as the file is mapped.
    """
    if sys.platform.startswith("linux"):  # elsewhere this is advice that may be forgotten, or unknown
        for file in mapped:
            file.madvise(mmap.MADV_DONTNEED)
