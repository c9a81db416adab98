"""The machine: its processor, how much memory a process may use, and giving memory back to it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
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
    named = sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode("utf-8", "replace")
    return named or platform.processor() or platform.machine()


def sysctl(name: str) -> bytes:
    """What macOS says of ``name``; nothing where it knows no such name, and on other systems."""
    if sys.platform != "darwin":
        return b""
    ask = ctypes.CDLL(None).sysctlbyname
    ask.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    size = ctypes.c_size_t(0)
    if ask(name.encode(), None, ctypes.byref(size), None, 0):
        return b""
    value = ctypes.create_string_buffer(size.value)
    return b"" if ask(name.encode(), value, ctypes.byref(size), None, 0) else value.raw[: size.value]


def usable_memory() -> int:
    """Bytes that this process may have: the machine's memory, or the limit of its container or service."""
    limits = (group.limit() for group in memory_groups())
    return min([_physical_memory(), *(limit for limit in limits if limit is not None)])


def _physical_memory() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.total)


def trim_heap() -> None:
    """Return to the system what the C library keeps of freed memory. Tens of milliseconds; only glibc has a way to."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 6),
    )


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group of Linux to which this process' memory is counted. version: of the interface, 1 or 2."""

    folder: Path
    version: int

    def limit(self) -> int | None:
        """Bytes; None where there is no limit: the root has none, and in a container a group may be mounted there."""
        return self._number("memory.max" if self.version == 2 else "memory.limit_in_bytes")

    def used(self) -> int:
        """Bytes, those of files that the system keeps because nobody else needs the memory included."""
        return self._number("memory.current" if self.version == 2 else "memory.usage_in_bytes") or 0

    def file_cache(self) -> int:
        """Bytes that files take of what is used."""
        prefix = (
            b"" if self.version == 2 else b"total_"
        )  # the older one counts groups below only by that name
        names = (prefix + b"active_file", prefix + b"inactive_file")
        lines = (line.partition(b" ") for line in read_bytes(self.folder / "memory.stat").splitlines())
        return sum(int(value) for name, _, value in lines if name in names)

    def _number(self, name: str) -> int | None:
        text = read_bytes(self.folder / name).strip()
        return int(text) if text.isdigit() else None


def memory_groups() -> list[MemoryGroup]:
    """This process' control group and those above it, of either version; none where there is no such thing."""
    groups = []
    for line in read_bytes(_OWN_CGROUPS).decode().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            groups.append(MemoryGroup(folder, 1 if controllers else 2))
            if folder == root:
                break
    return groups


def read_bytes(path: Path) -> bytes:
    """What the system says in a file; nothing if it has no such file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(file)
