"""The C kernels as built for several instruction sets; what the machine cannot run is left out."""

from __future__ import annotations

import os
from pathlib import Path

import arm_emulator
import pytest
import torch
from tensors import OnTensors

from paged_backend.kernels.cpu.backend import CpuKernels
from paged_backend.kernels.cpu.build import build
from paged_backend.kernels.cpu.targets import TARGETS, WITHOUT_MATRIX_UNIT


def _builds() -> dict[str, tuple[str, ...] | None]:
    if target := os.environ.get("PAGED_BACKEND_TARGET"):
        return {target: None}  # that one and no other
    builds: dict[str, tuple[str, ...] | None] = {"native": None, "portable": TARGETS["portable"]}
    features = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if {"avx2", "fma"} <= set(features) or (
        not features and "AVX" in torch.backends.cpu.get_cpu_capability()
    ):
        builds["avx2"] = TARGETS["avx2"]
    if "avx_vnni" in features:
        builds["avx2-vnni"] = TARGETS["avx2-vnni"]
    if "amx_tile" in features:
        builds["no-matrix-unit"] = WITHOUT_MATRIX_UNIT
    return builds


_BUILDS = _builds()
_OF_WEIGHTS = ("avx2-vnni", "no-matrix-unit", "arm-dot")
_WEIGHT_TESTS = ("test_cpu_linear.py", "test_cpu_blocks.py", "test_matmul_precision.py")
_EMULATED: dict[str, tuple[str, ...]] = (
    {"arm": (), "arm-dot": ("-mcpu=baseline+dotprod",)}
    if "native" in _BUILDS and arm_emulator.available()
    else {}
)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some builds differ from another in how they multiply weights only; an emulator takes its time."""
    items[:] = [
        i for i in items if i.path.name in _WEIGHT_TESTS or not any(build in i.name for build in _OF_WEIGHTS)
    ]
    for item in items:
        if "[arm" in item.name and any(long in item.name for long in ("same_bits", "14-2-256")):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=_BUILDS.values(), ids=_BUILDS.keys())
def library(request: pytest.FixtureRequest) -> Path:
    """One build."""
    return build(request.param)


@pytest.fixture(scope="session", params=[*_BUILDS, *_EMULATED])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnTensors:
    """One build with one thread; a test that wants more sets ``threads`` through ``threads``."""
    if request.param not in _EMULATED:
        return OnTensors(CpuKernels(1, build(_BUILDS[request.param])))
    kernels = CpuKernels(1)
    library = arm_emulator.compile_for_arm(tmp_path_factory.mktemp(request.param), _EMULATED[request.param])
    kernels._lib = arm_emulator.EmulatedLibrary(library)  # type: ignore[assignment]
    return OnTensors(kernels)


@pytest.fixture
def threads(kernels: OnTensors):  # type: ignore[no-untyped-def]
    """Set the number of threads for the length of a test."""

    def use(count: int) -> None:
        kernels.threads = count

    yield use
    kernels.threads = 1


@pytest.fixture(autouse=True)
def _torch_on_one_thread():  # type: ignore[no-untyped-def]
    """The expected values come from many small torch operations, which a second thread only slows down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    params=[
        (9, 3, 64),
        (2, 2, 80),
        (4, 1, 96),
        (8, 1, 128),
        (5, 1, 64),
        (14, 2, 256),
        (50, 1, 20),
        (6, 1, 80),
        (3, 3, 128),
    ],
    ids=lambda shape: "-".join(map(str, shape)),
)
def head_shape(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    """(heads, key heads, head size) that attention is tested with, by whatever kernels."""
    shape: tuple[int, int, int] = request.param
    return shape
