"""How many cores there are to compute on."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def _usable() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Logical cores that this process may run on."""
    return len(_usable())


def default_threads() -> int:
    """Threads to compute with: what ``OMP_NUM_THREADS`` says, as everywhere else, or one for each usable physical core.

    Two threads of one core share its arithmetic units, which kernels like these fill alone.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if said.isdecimal() and int(said) > 0:
        return int(said)
    return len({_siblings(core) for core in _usable()})


def _siblings(core: int) -> str:
    """The logical cores that share the physical one of ``core``, as the system writes them; its number if unknown."""
    try:
        return (_TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text("ascii").strip()
    except OSError:
        return str(core)
