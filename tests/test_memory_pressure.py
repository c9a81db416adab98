"""When the system is short of memory, and of how much, by what Linux writes into its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_backend import machine, memory_pressure
from paged_backend.memory_pressure import MemoryPressure

MIB = 1 << 20
QUIET = "some avg10=0.00 avg60=9.00 avg300=50.00 total=1\nfull avg10=50.00 avg60=0.00 avg300=0.00 total=1\n"


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 1000 MiB, half of them available, on which nobody waits and no control group limits anything."""
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory_pressure, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_pressure, "_STALLS", tmp_path / "stalls")
    write(tmp_path / "own", "4:memory:/service/worker\n3:cpuset:/other\n0::/service/worker")
    write(tmp_path / "stalls", QUIET)
    available(tmp_path, 500)
    return tmp_path


def available(system: Path, mib: int) -> None:
    lines = {"MemTotal": 1000, "MemFree": 1, "MemAvailable": mib, "Buffers": 3}
    write(system / "meminfo", "\n".join(f"{name}:   {value << 10} kB" for name, value in lines.items()))


def group(system: Path, limit: object, used: int, active: int, inactive: int, version: int = 2) -> None:
    """A limit on the group above the one of the process. In MiB."""
    folder = system / "groups" / ("service" if version == 2 else "memory/service")
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if version == 2 else "total_"
    write(folder / names[0], limit if isinstance(limit, str) else limit * MIB)
    write(folder / names[1], used * MIB)
    counted = {
        "anon": 7,
        f"{prefix}active_file": active,
        f"{prefix}inactive_file": inactive,
        "active_anon": 90,
    }
    write(folder / "memory.stat", "\n".join(f"{name} {value * MIB}" for name, value in counted.items()))


def test_enough_is_available_down_to_a_tenth_and_below_it_the_rest_of_that_tenth_is_missing(
    system: Path,
) -> None:
    pressure = MemoryPressure()
    assert pressure.missing() == 0
    available(system, 100)
    assert pressure.missing() == 0
    available(system, 70)
    assert pressure.missing() == 30 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_s_memory_is_what_counts_in_it_and_files_give_way(system: Path, version: int) -> None:
    group(system, 200, 180, 0, 0, version)
    pressure = MemoryPressure()
    assert pressure.missing() == 0
    group(system, 200, 195, 3, 5, version)
    assert pressure.missing() == 7 * MIB
    group(system, 200, 195, 10, 20, version)
    assert pressure.missing() == 0
    group(system, 100, 95, 0, 0, version)
    assert pressure.missing() == 5 * MIB, "a limit may be set anew"


@pytest.mark.parametrize(("limit", "version"), [("max", 2), (str(0x7FFFFFFFFFFFF000), 1), (1000, 2)])
def test_a_group_without_a_limit_of_its_own_lacks_nothing(system: Path, limit: object, version: int) -> None:
    group(system, limit, 995, 0, 0, version)
    assert MemoryPressure().missing() == 0


def test_what_is_missing_most_is_what_is_missing(system: Path) -> None:
    available(system, 95)
    group(system, 200, 190, 0, 0)
    assert MemoryPressure().missing() == 10 * MIB
    available(system, 60)
    assert MemoryPressure().missing() == 40 * MIB


def test_while_programs_stand_still_for_a_tenth_of_the_time_all_is_missing(system: Path) -> None:
    pressure = MemoryPressure()
    write(system / "stalls", QUIET.replace("some avg10=0.00", "some avg10=9.99"))
    assert pressure.missing() == 0
    write(system / "stalls", QUIET.replace("some avg10=0.00", "some avg10=10.00"))
    assert pressure.missing() == 1000 * MIB


def test_a_system_that_says_nothing_is_not_short(system: Path) -> None:
    for name in ("own", "meminfo", "stalls"):
        (system / name).unlink()
    assert MemoryPressure().missing() == 0
    write(system / "stalls", "")
    assert MemoryPressure().missing() == 0
