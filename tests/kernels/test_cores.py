"""How many threads the C kernels take when nobody says."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from paged_backend.kernels.cpu import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight logical cores on four physical ones, of which the process may use the first six; no OMP_NUM_THREADS."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(cores, "_usable", lambda: list(range(6)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def test_there_is_one_thread_for_each_physical_core_that_may_be_used(machine: Path, monkeypatch) -> None:
    assert cores.usable_cores() == 6
    assert cores.default_threads() == 4
    monkeypatch.setattr(cores, "_usable", lambda: [1, 5])
    assert cores.default_threads() == 1


def test_where_the_system_tells_nothing_every_core_counts(machine: Path, monkeypatch) -> None:
    monkeypatch.setattr(cores, "_TOPOLOGY", machine / "elsewhere")
    assert cores.default_threads() == 6


@pytest.mark.parametrize(
    ("said", "threads"), [("3", 3), (" 2 ", 2), ("2,4", 2), ("0", 4), ("many", 4), ("", 4)]
)
def test_omp_num_threads_decides_if_it_says_a_number(machine: Path, monkeypatch, said, threads) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert cores.default_threads() == threads


@pytest.mark.parametrize(
    ("told", "threads"),
    [({"hw.physicalcpu": 8}, 8), ({"hw.physicalcpu": 8, "hw.perflevel0.physicalcpu": 4}, 4), ({}, 6)],
    ids=["all alike", "fast and slow", "not told"],
)
def test_on_macos_the_fast_physical_cores_count(
    tmp_path: Path, machine: Path, monkeypatch, told, threads
) -> None:
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path / "none")
    monkeypatch.setattr(cores, "sysctl", lambda name: struct.pack("=I", told[name]) if name in told else b"")
    assert cores.default_threads() == threads


def test_on_windows_two_logical_cores_of_one_are_one(machine: Path, monkeypatch) -> None:
    core, cache, package = 0, 2, 3
    processors = b"".join(
        struct.pack("<QI20x", mask, kind)
        for mask, kind in [(3, core), (3, cache), (12, core), (12, cache), (15, package)]
    )
    monkeypatch.setattr(cores.sys, "platform", "win32")
    monkeypatch.setattr(cores, "_windows_processors", lambda: processors)
    assert cores.default_threads() == 2
