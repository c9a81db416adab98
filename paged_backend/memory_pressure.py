"""Memory pressure: whether Linux runs short of memory, and of how much.

Short is less than a tenth available, of the machine's memory (there earlyoom begins to kill) or of what a control group
of this process may have. And it is short, whatever is available, while programs stand still for want of memory for a
tenth of the time, which the kernel measures ("pressure stall information").
"""

from __future__ import annotations

from pathlib import Path

from paged_backend.machine import memory_groups, read_bytes

_MEMINFO = Path("/proc/meminfo")
_STALLS = Path("/proc/pressure/memory")
_SPARE = 10  # the part of all memory, and of all time, that is the limit: a tenth


class MemoryPressure:
    """Asks for what is written above; files that a system does not have say nothing.

    Groups that have no limit when this is made are not looked at again: every file costs some microseconds.
    """

    def __init__(self) -> None:
        total, _ = _machine()
        limits = [(group, group.limit()) for group in memory_groups()]
        self._groups = [group for group, limit in limits if limit is not None and limit < total]

    def missing(self) -> int:
        """Bytes to give back until a tenth is available, all of the machine's while programs stand still; else 0."""
        total, available = _machine()
        if _stalled_percent() * _SPARE >= 100:
            return total
        missing = total // _SPARE - available
        for group in self._groups:
            limit = group.limit()
            if limit is None:
                continue
            spare = limit - group.used() - limit // _SPARE
            if spare < 0:  # what files take goes before anybody runs short; only now it is worth asking
                missing = max(missing, -spare - group.file_cache())
        return max(missing, 0)


def _machine() -> tuple[int, int]:
    """Bytes of memory, and of it available without swapping."""
    found = {}
    for line in read_bytes(_MEMINFO).splitlines()[:3]:  # MemTotal, MemFree, MemAvailable
        name, _, value = line.partition(b":")
        found[name] = int(value.split()[0]) << 10
    return found.get(b"MemTotal", 0), found.get(b"MemAvailable", 0)


def _stalled_percent() -> float:
    """Share of the last ten seconds in which some program waited for memory."""
    _, found, rest = read_bytes(_STALLS).partition(b"some avg10=")
    return float(rest.split(None, 1)[0]) if found else 0.0
