"""The machine: its processor, and how much memory a process may use."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_memory() -> int:
    """Bytes that this process may have: the machine's memory, or the limit of its container or service."""
    return min([_physical_memory(), *_cgroup_limits()])


def _physical_memory() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.total)


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 6),
    )


def _cgroup_limits() -> list[int]:
    """What Linux holds this process to: its control group and those above it, of either version."""
    limits = []
    try:
        lines = _OWN_CGROUPS.read_text("utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                text = (folder / name).read_text("ascii").strip()
            except OSError:  # the root has no limit; in a container its own group may be mounted as the root
                text = "max"
            if text.isdecimal():
                limits.append(int(text))
            if folder == root:
                break
    return limits
