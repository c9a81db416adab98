"""How much memory a process may have, on a machine and in a container."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from paged_backend import machine

GIB = 1 << 30
GLIBC = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "malloc_trim")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB with a folder of control groups that limit nothing yet."""
    monkeypatch.setattr(machine, "_physical_memory", lambda: 64 * GIB)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("4:memory:/service/worker\n3:cpuset:/other\n0::/service/worker\n")
    return tmp_path / "groups"


def limit(folder: Path, name: str, text: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{text}\n")


def test_a_process_in_no_group_may_have_what_the_machine_has(groups: Path) -> None:
    assert machine.usable_memory() == 64 * GIB
    machine._OWN_CGROUPS.unlink()
    assert machine.usable_memory() == 64 * GIB


@pytest.mark.parametrize("group", ["", "service", "service/worker"])
def test_the_group_of_the_process_and_those_above_it_limit_it(groups: Path, group: str) -> None:
    limit(groups / group, "memory.max", 4 * GIB)
    assert machine.usable_memory() == 4 * GIB
    limit(groups / "memory" / group, "memory.limit_in_bytes", 3 * GIB)  # the older version beside it
    assert machine.usable_memory() == 3 * GIB


def test_other_groups_and_other_controllers_limit_nothing(groups: Path) -> None:
    limit(groups / "other", "memory.max", GIB)
    limit(groups / "memory" / "other", "memory.limit_in_bytes", GIB)
    limit(groups / "service", "memory.max", "max")
    limit(
        groups / "memory" / "service", "memory.limit_in_bytes", 0x7FFFFFFFFFFFF000
    )  # how version 1 says "none"
    assert machine.usable_memory() == 64 * GIB


@pytest.mark.skipif(not GLIBC, reason="only glibc gives its heap back")
def test_what_the_heap_keeps_of_freed_memory_goes_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(64 << 10) for _ in range(1024)]  # too small for mappings of their own
    for piece in pieces:
        ctypes.memset(piece, 1, 64 << 10)
    for piece in pieces[:-1]:  # the last one stays, so that the heap cannot shrink by itself
        libc.free(piece)
    before = resident()
    machine.trim_heap()
    assert before - resident() > 32 << 20
    libc.free(pieces[-1])


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="the system is asked in another way")
def test_this_machine_has_memory() -> None:
    assert GIB // 4 < machine.usable_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_processor_that_no_file_names_is_named_by_macos_or_by_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_file(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(machine.Path, "read_text", no_file)
    assert machine.sysctl("machdep.cpu.brand_string") == b"" or sys.platform == "darwin"
    assert machine.cpu_name()
    monkeypatch.setattr(machine, "sysctl", {"machdep.cpu.brand_string": b"Apple M1\0"}.__getitem__)
    assert machine.cpu_name() == "Apple M1"
