"""Building the C kernels: fallback without a compiler, concurrent first starts, what the cache key depends on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from paged_backend.kernels.cpu.backend import CpuKernels
from paged_backend.kernels.cpu.build import KernelBuildError, build
from paged_backend.kernels.select import select_kernels


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_auto_falls_back_with_one_warning_that_names_the_fix(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert select_kernels("auto").name == "reference"
    assert len(seen) == 1
    assert "C compiler" in str(seen[0].message)
    with pytest.raises(KernelBuildError, match="CC"):
        select_kernels("c")
    assert not list(empty_cache.glob("*.so"))


def test_select_by_name() -> None:
    assert select_kernels("c").name == "c"
    assert select_kernels("auto", threads=1).name == "c"
    assert select_kernels("reference").name == "reference"
    with pytest.raises(ValueError, match="cuda"):
        select_kernels("cuda")


def test_concurrent_first_starts_end_with_one_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build()
    cache = tmp_path / "cache"
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(cache))
    # what is tested is who writes the file, not what is in it: this compiler hands out a library that is there
    compiler = tmp_path / "quick-cc"
    compiler.write_text(f'#!/bin/sh\nfor out; do :; done\nsleep 0.2\ncp {shlex.quote(str(built))} "$out"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    code = "import ctypes; from paged_backend.kernels.cpu.build import build; ctypes.CDLL(str(build())).pb_usable()"
    starts = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [p.wait(timeout=120) for p in starts] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


def test_an_unwritable_cache_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelBuildError, match="PAGED_BACKEND_CACHE"):
        build()


def test_flags_are_part_of_the_key() -> None:
    assert build() == build()
    assert build() != build(())


def test_no_second_openmp_runtime_is_loaded() -> None:
    code = (
        "import torch; torch.zeros(4) @ torch.zeros(4)\n"
        "from paged_backend.kernels.cpu.backend import CpuKernels\n"
        "k = CpuKernels(2); k.linear(torch.randn(64, 512), k.pack_linear([torch.randn(512, 512)]))\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "assert len({m for m in maps if 'libgomp' in m or 'libiomp' in m or 'libomp' in m}) <= 1\n"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("the system lists no mapped files")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_two_python_threads_share_the_pool() -> None:
    kernels = CpuKernels(2)
    packed = kernels.pack_linear([torch.randn(480, 256)])
    x = torch.randn(64, 256)
    expected = kernels.linear(x, packed)
    bad: list[int] = []

    def work() -> None:
        for i in range(200):
            if not torch.equal(kernels.linear(x, packed), expected):
                bad.append(i)

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not bad


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_starts_its_own_workers() -> None:
    kernels = CpuKernels(2)
    packed = kernels.pack_linear([torch.randn(480, 256)])
    x = torch.randn(64, 256)
    expected = kernels.linear(x, packed)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for its parent's workers must not wait for ever
        os._exit(0 if torch.equal(kernels.linear(x, packed), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
