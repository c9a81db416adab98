"""Libraries that a wheel brings: which of them a processor gets, and that no compiler is asked for."""

from __future__ import annotations

import ctypes
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest

from paged_backend.kernels.cpu import build as build_module
from paged_backend.kernels.cpu import prebuilt as prebuilt_module
from paged_backend.kernels.cpu.backend import CpuKernels
from paged_backend.kernels.cpu.build import KernelBuildError, build
from paged_backend.kernels.cpu.targets import PREFERENCE, TARGETS, runnable


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a wheel has it, of which every library is the portable one, and neither compiler nor cache."""
    portable = build(TARGETS["portable"])
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for target in PREFERENCE:
        shutil.copy(portable, folder / f"{target}.so")
    monkeypatch.setattr(prebuilt_module, "FOLDER", folder)
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.delenv("PAGED_BACKEND_TARGET", raising=False)
    return folder


def test_what_a_wheel_brings_needs_no_compiler_and_no_cache(brought: Path, tmp_path: Path) -> None:
    assert build().parent == build_module.library_path().parent == brought
    build_module.check()
    kernels = CpuKernels(1)
    draw = np.random.default_rng(0)
    weight, x = draw.standard_normal((32, 64), np.float32), draw.standard_normal((3, 64), np.float32)
    assert np.allclose(kernels.linear(x, kernels.pack_linear([weight])), x @ weight.T, atol=1e-4)
    assert not (tmp_path / "cache").exists()


def test_another_library_is_chosen_by_name(brought: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND_TARGET", "portable")
    assert build() == brought / "portable.so"
    monkeypatch.setenv("PAGED_BACKEND_TARGET", "avx9000")
    with pytest.raises(KernelBuildError, match=r"'avx9000' is none of native, avx2, .*, portable"):
        build()


def test_native_is_compiled_here_although_a_wheel_brings_libraries(
    brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_BACKEND_TARGET", "native")
    with pytest.raises(KernelBuildError, match="no-such-compiler"):
        build()
    with pytest.raises(KernelBuildError, match="no-such-compiler"):
        build_module.check()


def test_a_target_that_the_processor_lacks_is_refused_and_not_run(
    brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt_module, "runnable", lambda sets: ["avx2", "portable"])
    assert build() == brought / "avx2.so"
    monkeypatch.setenv("PAGED_BACKEND_TARGET", "amx")
    with pytest.raises(KernelBuildError) as caught:
        build()
    assert str(caught.value) == "this processor cannot run PAGED_BACKEND_TARGET=amx: it takes avx2, portable"


def test_the_best_that_the_wheel_has_is_taken(brought: Path) -> None:
    best = build()
    if best.stem == "portable":
        pytest.skip("this processor has nothing beyond the portable instructions")
    best.unlink()
    assert build() != best
    assert build().stem == runnable_by(brought / "portable.so")[1]


def runnable_by(portable: Path) -> list[str]:
    return runnable(ctypes.CDLL(str(portable)).pb_instruction_sets())


@pytest.mark.parametrize(
    ("instruction_sets", "targets"),
    [
        (0, ["portable"]),
        (1, ["avx2", "portable"]),
        (1 | 2, ["avx2-vnni", "avx2", "portable"]),
        (1 | 4, ["avx512", "avx2", "portable"]),
        (1 | 4 | 8 | 32, ["avx512-bf16", "avx512-vnni", "avx512", "avx2", "portable"]),
        (1 | 2 | 4 | 8 | 16 | 32, list(PREFERENCE)),
    ],
)
def test_the_fastest_runnable_target_comes_first(instruction_sets: int, targets: list[str]) -> None:
    assert runnable(instruction_sets) == targets


def test_every_target_but_the_machines_own_has_a_place_in_the_order() -> None:
    assert set(PREFERENCE) == TARGETS.keys() - {"native"}


_FLAGS = {
    "avx2": "avx2 fma f16c",
    "avx2-vnni": "avx2 fma f16c avx_vnni",
    "avx512": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq",
    "avx512-vnni": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni",
    "avx512-bf16": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16",
    "amx": "f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512vbmi amx_tile amx_bf16 amx_int8",
    "portable": "",
}


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="the names are Linux's for x86-64"
)
def test_the_processor_is_asked_for_what_the_system_says_it_has() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    have = set(next(line for line in lines if line.startswith("flags")).split())
    expected = {target for target, flags in _FLAGS.items() if set(flags.split()) <= have}
    usable = set(runnable_by(build(TARGETS["portable"])))
    assert usable - {"amx"} == expected - {"amx"}
    assert usable <= expected  # a container may keep the matrix unit's registers from a process
