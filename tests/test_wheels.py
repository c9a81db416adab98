"""Wheels with the kernels inside: what is looked at before a library is packed, and what is in them."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from binaries import Needs, needs
from build_wheels import PLATFORMS, ROOT, WheelError, add_libraries, build_wheels, fault

from paged_backend.kernels.cpu.backend import _SIGNATURES
from paged_backend.kernels.cpu.build import build
from paged_backend.kernels.cpu.targets import TARGETS

LINUX, MACOS, WINDOWS = (PLATFORMS[name] for name in ("linux-x86_64", "macos-arm64", "windows-x86_64"))
GOOD = Needs(
    {"libc.so.6", "libpthread.so.0"},
    {"GLIBC_2.2.5", "GLIBC_2.17"},
    exports={*_SIGNATURES, "pb_instruction_sets"},
)


def test_a_library_of_this_system_is_read_as_binutils_read_it() -> None:
    if shutil.which("nm") is None or not (library := build(TARGETS["portable"])).read_bytes().startswith(
        b"\x7fELF"
    ):
        pytest.skip("needs nm and a system with ELF files")
    listed = subprocess.run(["nm", "-D", library], check=True, capture_output=True, text=True).stdout
    found = needs(library)
    assert found.exports == {line.split()[2] for line in listed.splitlines() if line[17:18] == "T"}
    assert found.versions == set(re.findall(r"@(\S+)", listed))
    assert "libc.so.6" in found.libraries
    assert not found.unbound
    assert {*_SIGNATURES, "pb_instruction_sets"} <= found.exports


@pytest.mark.parametrize(
    ("platform", "found", "problem"),
    [
        (LINUX, GOOD, None),
        (
            LINUX,
            replace(GOOD, versions={"GLIBC_2.18"}),
            "needs GLIBC_2.18, and the wheel promises to run with glibc 2.17",
        ),
        (LINUX, replace(GOOD, versions={"GLIBCXX_3.4"}), "needs GLIBCXX_3.4, and the wheel promises"),
        (LINUX, replace(GOOD, libraries={"libc.so.6", "libgomp.so.1"}), "needs libgomp.so.1"),
        (LINUX, replace(GOOD, unbound={"sched_yield", "cosf"}), "does not define cosf, sched_yield"),
        (LINUX, replace(GOOD, exports=GOOD.exports - {"pb_linear"}), "does not export pb_linear"),
        (MACOS, replace(GOOD, libraries={"/usr/lib/libSystem.B.dylib"}, minimum_os=(11, 0)), None),
        (MACOS, replace(GOOD, libraries=set(), minimum_os=(15, 0)), "needs macOS (15, 0)"),
        (MACOS, GOOD, "needs libc.so.6, libpthread.so.0"),
        (WINDOWS, replace(GOOD, libraries={"KERNEL32.dll", "api-ms-win-crt-heap-l1-1-0.dll"}), None),
        (WINDOWS, replace(GOOD, libraries={"libwinpthread-1.dll"}), "needs libwinpthread-1.dll"),
    ],
)
def test_a_library_that_its_platform_may_not_load_goes_into_no_wheel(platform, found, problem) -> None:
    assert (fault(platform, found) or "").startswith(problem or "")
    assert (fault(platform, found) is None) == (problem is None)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"#!/bin/sh\n")
    with pytest.raises(ValueError, match="no shared library"):
        needs(tmp_path / "kernels.so")


@pytest.fixture
def pure(tmp_path: Path) -> Path:
    """A wheel without libraries."""
    pytest.importorskip("wheel", reason="needs: pip install wheel")
    facts = tmp_path / "tree" / "some_package-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    source = tmp_path / "tree" / "paged_backend" / "kernels" / "cpu" / "ops.c"
    source.parent.mkdir(parents=True)
    source.touch()
    pack = [sys.executable, "-m", "wheel", "pack", str(tmp_path / "tree"), "--dest-dir", str(tmp_path)]
    subprocess.run(pack, check=True)
    return tmp_path / "some_package-1.0-py3-none-any.whl"


def test_a_platforms_wheel_says_so_in_its_name_and_in_it(pure: Path, tmp_path: Path) -> None:
    (tmp_path / "avx2.so").write_bytes(b"library")
    (tmp_path / "out").mkdir()
    made = add_libraries(pure, LINUX, [tmp_path / "avx2.so"], tmp_path / "out")
    assert set(made.stem.split("-")[-1].split(".")) == {"manylinux_2_17_x86_64", "manylinux2014_x86_64"}
    with zipfile.ZipFile(made) as archive:
        assert archive.read("paged_backend/kernels/cpu/prebuilt/avx2.so") == b"library"
        facts = archive.read("some_package-1.0.dist-info/WHEEL").decode().splitlines()
        record = archive.read("some_package-1.0.dist-info/RECORD").decode()
    assert "Root-Is-Purelib: false" in facts
    assert {line for line in facts if "Tag" in line} == {f"Tag: py3-none-{tag}" for tag in LINUX.tags}
    assert "prebuilt/avx2.so,sha256=" in record


def test_a_wheel_that_is_too_large_is_not_made(
    pure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "avx2.so").write_bytes(b"library")
    monkeypatch.setattr("build_wheels.MOST_BYTES", 100)
    with pytest.raises(WheelError, match="more than 100"):
        add_libraries(pure, LINUX, [tmp_path / "avx2.so"], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)  # the first time, zig compiles the C library of Windows
def test_the_wheels_of_all_platforms_build_anywhere_and_hold_what_runs_and_no_more(tmp_path: Path) -> None:
    for package in ("ziglang", "wheel"):
        pytest.importorskip(package, reason=f"needs: pip install {package}")
    sdist, *wheels = build_wheels(list(PLATFORMS), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in (sdist, *wheels)
    )
    python = {
        str(
            Path("paged_backend", path.relative_to(ROOT))
            if folder != "paged_backend"
            else path.relative_to(ROOT)
        )
        for folder in ("paged_backend", "kernels", "adapters")
        for path in (ROOT / folder).rglob("*.py")
    }
    for (name, platform), wheel in zip(PLATFORMS.items(), wheels, strict=True):
        with zipfile.ZipFile(wheel) as archive:
            files = set(archive.namelist())
        brought = {
            f"paged_backend/kernels/cpu/prebuilt/{target}{platform.suffix}" for target in platform.targets
        }
        assert {file for file in files if "/prebuilt/" in file} == brought, name
        assert {file for file in files if file.endswith(".py")} == python
        assert {Path(file).suffix for file in files - brought if "dist-info" not in file} == {
            *(".py", ".typed", ".c", ".h", ".css", ".html", ".js", ".svg")
        }  # fmt: skip
    version = importlib.metadata.version("paged-backend")
    assert {wheel.name.split("-")[1] for wheel in wheels} == {version}
