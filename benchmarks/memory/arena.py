"""Arenas: where a contiguous allocator places its reservations. Sizes are in token slots.

They are real allocators (addresses, splits, merges), because external fragmentation is a matter of addresses.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol


class Arena(Protocol):
    """allocate: address of ``size`` slots, None if no hole is large enough. release: give back what was allocated."""

    size: int
    used: int

    def allocate(self, size: int) -> int | None: ...

    def release(self, address: int) -> None: ...

    def fits_empty(self, size: int) -> bool: ...


class FirstFitArena:
    """The first hole that is large enough, at its low end. Neighbouring holes merge."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._holes: list[tuple[int, int]] = [(0, size)]  # (address, length), by address
        self._held: dict[int, int] = {}

    def fits_empty(self, size: int) -> bool:
        return size <= self.size

    def allocate(self, size: int) -> int | None:
        for i, (address, length) in enumerate(self._holes):
            if length >= size:
                self._holes[i : i + 1] = [(address + size, length - size)] if length > size else []
                self._held[address] = size
                self.used += size
                return address
        return None

    def release(self, address: int) -> None:
        length = self._held.pop(address)
        self.used -= length
        at = bisect_left(self._holes, (address, 0))
        start, stop = address, address + length
        if at < len(self._holes) and self._holes[at][0] == stop:
            stop += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == start:
            start = self._holes.pop(at - 1)[0]
        insort(self._holes, (start, stop - start))


class BuddyArena:
    """Binary buddies: every block is a power of two on a multiple of its size; halves split and merge.

    ``used`` counts what was asked for, so the rounding up to a power of two shows as memory nobody can use,
    which is how the PagedAttention paper counts it (external fragmentation).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._free: dict[int, list[int]] = {}  # order -> addresses
        self._held: dict[int, tuple[int, int]] = {}  # address -> (order, size asked)
        address = 0
        for order in reversed(
            range(size.bit_length())
        ):  # an arena that is no power of two: its binary digits
            if size >> order & 1:
                self._free[order] = [address]
                address += 1 << order

    def fits_empty(self, size: int) -> bool:
        return _order(size) < self.size.bit_length()

    def allocate(self, size: int) -> int | None:
        wanted = _order(size)
        order = next((o for o in range(wanted, self.size.bit_length()) if self._free.get(o)), None)
        if order is None:
            return None
        address = self._free[order].pop(0)
        while order > wanted:
            order -= 1
            insort(self._free.setdefault(order, []), address + (1 << order))
        self._held[address] = (wanted, size)
        self.used += size
        return address

    def release(self, address: int) -> None:
        order, size = self._held.pop(address)
        self.used -= size
        while (buddy := address ^ (1 << order)) in self._free.get(order, ()):
            self._free[order].remove(buddy)
            address = min(address, buddy)
            order += 1
        insort(self._free.setdefault(order, []), address)


def _order(size: int) -> int:
    return (size - 1).bit_length()
