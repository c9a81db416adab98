"""Building the C kernels: fallback without a compiler, concurrent first starts, what the cache key depends on."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from packing import pack
from tensors import OnTensors

from paged_backend.kernels.cpu import build as build_module
from paged_backend.kernels.cpu.backend import CpuKernels
from paged_backend.kernels.cpu.build import KernelBuildError, build
from paged_backend.kernels.cpu.targets import TARGETS
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


def built_name(cache: Path) -> str:
    (library,) = cache.glob("*.so")
    return library.name


NO_LOCKS = """import fcntl
def flock(*arguments):
    raise OSError(95, "Operation not supported")
fcntl.flock = flock
"""


@pytest.mark.parametrize("without_locks", ["", NO_LOCKS], ids=["with locks", "without"])
def test_of_concurrent_first_starts_one_compiles_and_all_end_with_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_locks: str
) -> None:
    built = build()
    cache = tmp_path / "cache"
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(cache))
    # what is tested is who writes the file, not what is in it: this compiler hands out a library that is there
    calls = tmp_path / "calls"
    compiler = tmp_path / "quick-cc"
    compiler.write_text(
        f'#!/bin/sh\nfor out; do :; done\nsleep 0.2\necho "$out" >> {calls}\ncp {shlex.quote(str(built))} "$out"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    code = "import ctypes; from paged_backend.kernels.cpu.build import build; ctypes.CDLL(str(build())).pb_usable()"
    starts = [subprocess.Popen([sys.executable, "-c", without_locks + code]) for _ in range(3)]
    assert [p.wait(timeout=120) for p in starts] == [0, 0, 0]
    assert {path.name for path in cache.iterdir()} - {"build.lock"} == {built_name(cache)}
    links = [line for line in calls.read_text().splitlines() if line.endswith(".so")]
    assert 1 <= len(links) <= (3 if without_locks else 1)


@pytest.mark.parametrize("made_meanwhile", [True, False])
def test_a_library_that_another_process_has_made_and_loaded_is_taken(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, made_meanwhile: bool
) -> None:
    """Windows refuses to replace a library that is loaded."""

    def refuse(made: str, library: Path) -> None:
        if made_meanwhile:
            library.touch()
        raise PermissionError(13, "Access is denied")

    monkeypatch.setattr(build_module, "_run", lambda commands: None)
    monkeypatch.setattr(build_module.os, "replace", refuse)
    if made_meanwhile:
        assert build().exists()
    else:
        with pytest.raises(KernelBuildError, match="PAGED_BACKEND_CACHE"):
            build()


def test_an_unwritable_cache_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelBuildError, match="PAGED_BACKEND_CACHE"):
        build()


def test_compiling_is_announced_once_and_finding_the_library_is_not(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_module, "_compile", lambda compiler, flags, sources, library: library.touch())
    build()
    build()
    assert [record.getMessage() for record in caplog.records] == ["compiling the kernels, once, about 10 s"]


def test_no_more_compilers_run_at_once_than_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "usable_cores", lambda: 2)
    log = tmp_path / "log"
    step = ["sh", "-c", f"echo + >> {log}; sleep 0.1; echo - >> {log}"]
    build_module._run([step] * 5)
    running, most = 0, 0
    for sign in log.read_text().split():
        running += 1 if sign == "+" else -1
        most = max(most, running)
    assert most == 2


def test_what_a_killed_build_left_is_removed_by_a_later_one(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_compile", lambda compiler, flags, sources, library: library.touch())
    for name in ("build-old", "build-new"):
        (empty_cache / name).mkdir(parents=True)
        (empty_cache / name / "ops.o").touch()
    os.utime(empty_cache / "build-old", (1, 1))
    build()
    assert [path.name for path in empty_cache.glob("build-*")] == ["build-new"]


def test_a_compiler_that_fails_is_named_without_its_flags(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(KernelBuildError) as caught:
        build()
    assert str(caught.value).startswith("`/bin/false` failed (")
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("compiler", ["/bin/false", "/bin/true", "no-such-compiler"])
def test_a_check_finds_a_compiler_that_does_not_work(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    build_module.check()
    assert not empty_cache.exists()
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(KernelBuildError, match="CC"):
        build_module.check()


def test_a_check_finds_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGED_BACKEND_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/x")
    with pytest.raises(KernelBuildError, match="PAGED_BACKEND_CACHE"):
        build_module.check()


@pytest.fixture
def fake_ziglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``ziglang`` package whose compiler hands out a library that is there, and no other compiler on the path."""
    built = build()
    package = tmp_path / "site" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import pathlib, shutil, sys\n"
        f"pathlib.Path({str(tmp_path / 'calls')!r}).open('a').write(' '.join(sys.argv[1:]) + chr(10))\n"
        f"shutil.copy({str(built)!r}, sys.argv[-1])\n"
    )
    _only_compiler(package.parent, tmp_path, monkeypatch)
    return package


def _only_compiler(site: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no-programs").mkdir()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    if site is not None:
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("PYTHONPATH", str(site))


def test_without_a_system_compiler_that_of_ziglang_is_taken(
    fake_ziglang: Path, empty_cache: Path, tmp_path: Path
) -> None:
    assert build_module.find_compiler() == [sys.executable, "-m", "ziglang", "cc"]
    build_module.check()
    library = build()
    assert select_kernels("c").name == "c"
    lines = (tmp_path / "calls").read_text().splitlines()
    assert all(line.startswith("cc ") for line in lines)
    assert sum(f"{empty_cache}" in line and "-shared" in line for line in lines) == 1
    assert library.parent == empty_cache


def test_a_system_compiler_comes_before_ziglang(
    fake_ziglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcc = tmp_path / "no-programs" / "gcc"
    gcc.write_text("#!/bin/sh\n")
    gcc.chmod(0o755)
    assert build_module.find_compiler() == [str(gcc)]
    monkeypatch.setenv("CC", "no-such-compiler")  # what is named and missing is an error, not another's turn
    with pytest.raises(KernelBuildError, match="'no-such-compiler' names no program"):
        build_module.find_compiler()


def test_another_ziglang_has_another_library(fake_ziglang: Path, empty_cache: Path) -> None:
    before = build_module.library_path()
    assert before == build_module.library_path()
    (fake_ziglang / "__init__.py").write_text("# a new version")
    assert build_module.library_path() != before


def test_zig_takes_the_portable_target_for_any_machine_and_not_for_this_one(fake_ziglang: Path) -> None:
    zig = build_module.find_compiler()
    assert "-mcpu=baseline" in build_module._flags(zig, TARGETS["portable"])
    assert "-mcpu=baseline" in build_module._flags(["/opt/zig", "cc"], TARGETS["portable"])
    assert build_module._flags(zig, TARGETS["avx2"]) == build_module._flags(["/usr/bin/cc"], TARGETS["avx2"])
    assert "-mcpu=baseline" not in build_module._flags(["/usr/bin/cc"], TARGETS["portable"])


def test_without_any_compiler_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_compiler(None, tmp_path, monkeypatch)
    monkeypatch.setattr(build_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelBuildError, match="pip install ziglang") as caught:
        build_module.find_compiler()
    assert "\n" not in str(caught.value)


def test_flags_are_part_of_the_key() -> None:
    assert build() == build()
    assert build(TARGETS["native"]) != build(TARGETS["portable"])


def test_the_target_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGED_BACKEND_TARGET", raising=False)
    native = build()
    monkeypatch.setenv("PAGED_BACKEND_TARGET", "portable")
    assert build() == build(()) != native
    monkeypatch.setenv("PAGED_BACKEND_TARGET", "avx9000")
    with pytest.raises(KernelBuildError, match=r"'avx9000' is none of native, avx2, .*, portable"):
        build()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the targets are those of x86")
@pytest.mark.parametrize(
    ("flag", "files"),
    [
        (
            "-march=sapphirerapids",
            ["linear.c", "linear_amx.c", "linear_amx_int.c", "linear_blocks.c", "linear_few.c"],
        ),
        ("-mavxvnni", ["linear_blocks.c", "linear_int.c"]),
    ],
)
def test_what_few_machines_can_run_is_checked_by_every_compiler(flag: str, files: list[str]) -> None:
    command = [*build_module.find_compiler(), "-fsyntax-only", *TARGETS["avx2"], flag]
    if subprocess.run([*command, "-xc", "-"], input="", text=True, capture_output=True).returncode:
        pytest.skip("the compiler does not know the target")
    sources = [path for path in build_module._sources() if path.name in files]
    assert len(sources) == len(files)
    strict = ["-std=gnu11", "-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types"]
    done = subprocess.run([*command, *strict, *sources], text=True, capture_output=True)
    assert not done.returncode, done.stderr


def test_no_second_openmp_runtime_is_loaded() -> None:
    code = (
        "import torch; torch.zeros(4) @ torch.zeros(4)\n"
        "from paged_backend.kernels.cpu.backend import CpuKernels\n"
        "k = CpuKernels(2); k.linear(torch.randn(64, 512).numpy(), k.pack_linear([torch.randn(512, 512).numpy()]))\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "assert len({m for m in maps if 'libgomp' in m or 'libiomp' in m or 'libomp' in m}) <= 1\n"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("the system lists no mapped files")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_two_python_threads_share_the_pool() -> None:
    kernels = OnTensors(CpuKernels(2))
    packed = pack(kernels, [torch.randn(480, 256)])
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
    kernels = OnTensors(CpuKernels(2))
    packed = pack(kernels, [torch.randn(480, 256)])
    x = torch.randn(64, 256)
    expected = kernels.linear(x, packed)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for its parent's workers must not wait for ever
        os._exit(0 if torch.equal(kernels.linear(x, packed), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
