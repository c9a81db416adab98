"""How many cores there are to compute on."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

from paged_backend.machine import sysctl

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
    return _physical_cores() or len({_siblings(core) for core in _usable()})


def _physical_cores() -> int:
    """Of macOS and Windows; 0 elsewhere. Of a machine with two kinds, the fast ones: the others would end last."""
    fast = sysctl("hw.perflevel0.physicalcpu") or sysctl("hw.physicalcpu")
    if fast:
        return int.from_bytes(fast, sys.byteorder)
    return _count_cores(_windows_processors()) if sys.platform == "win32" else 0


def _windows_processors() -> bytes:
    """Windows' SYSTEM_LOGICAL_PROCESSOR_INFORMATION, 32 bytes each."""
    ask = ctypes.windll.kernel32.GetLogicalProcessorInformation  # type: ignore[attr-defined]
    ask.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    size = ctypes.c_uint32(0)
    ask(None, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    return found.raw[: size.value] if ask(found, ctypes.byref(size)) else b""


def _count_cores(processors: bytes) -> int:
    return sum(
        kind == 0 for _, kind in struct.iter_unpack("<QI20x", processors)
    )  # the others are caches and the like


def _siblings(core: int) -> str:
    """The logical cores that share the physical one of ``core``, as the system writes them; its number if unknown."""
    try:
        return (_TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text("ascii").strip()
    except OSError:
        return str(core)
